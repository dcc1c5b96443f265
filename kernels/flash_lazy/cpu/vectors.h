// Vectors of floats as wide as the instruction set that the file is compiled for, by the compiler's vector types.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Int __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));
typedef float Unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOWEST = -std::numeric_limits<float>::max();
constexpr float LOG2E = 1.44269504088896340736f;
constexpr float LN2 = 0.69314718055994530942f;

INLINE int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

INLINE Vec load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
INLINE void store(float* p, Vec x) { *reinterpret_cast<Unaligned*>(p) = x; }
INLINE Vec fill(float x) { return x - Vec{}; }  // x + 0 would turn -0 into 0

// a where the mask is set, else b.
INLINE Vec select(Int mask, Vec a, Vec b) { return mask ? a : b; }
// The larger one; a NaN in x is ignored, one in y is returned.
INLINE Vec larger(Vec x, Vec y) { return select(x > y, x, y); }
// x without its negative entries; NaN stays, as in torch.relu.
INLINE Vec relu(Vec x) { return select(x <= 0, Vec{}, x); }

// Entries of a and b, which follow a's, by their indices.
template <int... i>
INLINE Vec shuffle(Vec a, Vec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, i...);
#else
  return __builtin_shuffle(a, b, Int{i...});
#endif
}
// The vector's entries moved down by `step`, those that fall out at the end.
template <int step, int... i>
INLINE Vec rotate(Vec x, std::integer_sequence<int, i...>) {
  return shuffle<(i + step) % W...>(x, x);
}
template <int step = W / 2, class Combine>
INLINE float reduce(Vec x, Combine combine) {
  if constexpr (step == 0) return x[0];
  else return reduce<step / 2>(combine(x, rotate<step>(x, std::make_integer_sequence<int, W>{})), combine);
}
INLINE float sum(Vec x) { return reduce(x, [](Vec a, Vec b) { return a + b; }); }
// Blocks of 2 * half entries of a and b by turns, the halves of each added.
template <int half, int... i>
INLINE Vec add_halves(Vec a, Vec b, std::integer_sequence<int, i...>) {
  return shuffle<i / half % 2 * W + i / half / 2 * 2 * half + i % half...>(a, b) +
         shuffle<i / half % 2 * W + i / half / 2 * 2 * half + i % half + half...>(a, b);
}
// The sum of each of W vectors, with the bits of `sum`.
template <int half = W / 2>
INLINE Vec sum_each(const Vec* x) {
  Vec halves[half];
  for (int n = 0; n < half; n++) halves[n] = add_halves<half>(x[n], x[n + half], std::make_integer_sequence<int, W>{});
  if constexpr (half == 1) return halves[0];
  else return sum_each<half / 2>(halves);
}
INLINE float largest(Vec x) { return reduce(x, larger); }

// 2^x for x <= 126: 0 below -126, NaN for NaN, exactly 1 at 0. Relative error at most 1.2e-7.
INLINE Vec exp2(Vec x) {
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
  Vec rounded = x + magic;
  Bits bits;
  __builtin_memcpy(&bits, &rounded, sizeof bits);
  Vec f = x - (rounded - magic);  // -0.5 .. 0.5
  // Minimax polynomial of the relative error of 2^f on that interval, with p(0) = 1.
  Vec p = fill(1.535336201e-4f);
  p = p * f + 1.339887445e-3f;
  p = p * f + 9.618437358e-3f;
  p = p * f + 5.550332471e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472029e-1f;
  p = p * f + 1.f;
  bits = (bits << 23) + (127 << 23);  // the float 2^round(x); the bits of magic above 2^9 are shifted out
  Vec power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return select(x < -126.f, Vec{}, p * power);
}

INLINE float scalar_exp2(float x) { return exp2(fill(x))[0]; }  // the library has an exp2(float)
