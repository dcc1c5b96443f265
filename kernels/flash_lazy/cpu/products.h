// Matrix products of blocks in cache.
//
// A library's product of one small block (R <= 48 rows) costs more in its call, its packing and its full square than in
// arithmetic: see docs/decisions.md. Operands are in cache here, B's and C's columns are padded to whole vectors, and
// the triangle above the diagonal is left out by panels of rows.
#pragma once

#include <algorithm>

#include "vectors.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int PANEL = 6;  // rows of C in registers: 6 x 2 vectors of 16 registers
#else
constexpr int PANEL = 12;  // 12 x 2 vectors of 32 registers
#endif

constexpr int64_t DEPTH = 128;  // terms of a running sum; longer sums are sums of such, which err less

// A matrix operand: element (row, column) is at data[row * row_step + column * column_step].
struct Matrix {
  const float* data;
  int64_t row_step, column_step;
  Matrix at(int64_t row, int64_t column = 0) const {
    return {data + row * row_step + column * column_step, row_step, column_step};
  }
};

// C[ROWS, VECTORS * W] (+)= A[ROWS, depth] B[depth, ...], held in registers.
template <int ROWS, int VECTORS>
INLINE void multiply_panel(int64_t depth, Matrix a, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  Vec total[ROWS][VECTORS]{};
  const float* column = a.data;
  for (int64_t k = 0; k < depth; k++, b += ldb, column += a.column_step) {
    Vec values[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) values[j] = load(b + j * W);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
      Vec factor = fill(column[row * a.row_step]);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) total[row][j] += factor * values[j];
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
      float* to = c + row * ldc + j * W;
      store(to, add ? load(to) + total[row][j] : total[row][j]);
    }
}

template <int ROWS>
static void multiply_rows(int64_t columns, int64_t depth, Matrix a, const float* b, int64_t ldb, float* c, int64_t ldc,
                          bool add) {
  int64_t k = 0;
  do {
    const int64_t part = std::min(DEPTH, depth - k);
    int64_t j = 0;
    for (; j + 2 * W <= columns; j += 2 * W)
      multiply_panel<ROWS, 2>(part, a.at(0, k), b + k * ldb + j, ldb, c + j, ldc, add || k);
    if (j < columns) multiply_panel<ROWS, 1>(part, a.at(0, k), b + k * ldb + j, ldb, c + j, ldc, add || k);
  } while ((k += DEPTH) < depth);
}

// C[rows <= PANEL, columns] (+)= A[rows, depth] B[depth, columns]; columns is a multiple of W.
template <int ROWS = PANEL>
static void multiply_up_to(int64_t rows, int64_t columns, int64_t depth, Matrix a, const float* b, int64_t ldb,
                           float* c, int64_t ldc, bool add) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return multiply_rows<ROWS>(columns, depth, a, b, ldb, c, ldc, add);
    multiply_up_to<ROWS - 1>(rows, columns, depth, a, b, ldb, c, ldc, add);
  }
}

// C[rows, columns] (+)= A[rows, depth] B[depth, columns]; columns is a multiple of W. A strip of B's columns stays in
// the first cache while all rows pass.
inline void multiply(int64_t rows, int64_t columns, int64_t depth, Matrix a, const float* b, int64_t ldb, float* c,
                     int64_t ldc, bool add) {
  for (int64_t j = 0; j < columns; j += 2 * W)
    for (int64_t m = 0; m < rows; m += PANEL)
      multiply_up_to(std::min<int64_t>(PANEL, rows - m), std::min<int64_t>(2 * W, columns - j), depth, a.at(m), b + j,
                     ldb, c + m * ldc + j, ldc, add);
}

// Row m of a block sees its tile's columns below edge + m. Of a panel that starts at row m, the first columns that any
// row sees, in whole vectors.
INLINE int64_t seen_columns(int64_t edge, int64_t m, int64_t columns) {
  return std::clamp<int64_t>(round_up(std::max<int64_t>(edge + m + PANEL - 1, 0), W), 0, columns);
}

// C = A[rows, depth] B[depth, columns], in each panel only the columns that one of its rows sees.
static void multiply_seen(int64_t rows, int64_t columns, int64_t depth, Matrix a, const float* b, int64_t ldb,
                          float* c, int64_t ldc, int64_t edge) {
  for (int64_t m = 0; m < rows; m += PANEL)
    multiply_up_to(std::min<int64_t>(PANEL, rows - m), seen_columns(edge, m, columns), depth, a.at(m), b, ldb,
                   c + m * ldc, ldc, false);
}

// C[rows, columns] += A[rows, keys] B[keys, columns], in each panel only the keys that one of its rows sees.
static void add_seen_keys(int64_t rows, int64_t columns, int64_t keys, Matrix a, const float* b, int64_t ldb, float* c,
                          int64_t ldc, int64_t edge) {
  for (int64_t m = 0; m < rows; m += PANEL) {
    int64_t depth = std::clamp<int64_t>(edge + m + PANEL - 1, 0, keys);
    multiply_up_to(std::min<int64_t>(PANEL, rows - m), columns, depth, a.at(m), b, ldb, c + m * ldc, ldc, true);
  }
}

// C[keys, columns] += A[rows, keys]^T B[rows, columns], for each panel of keys only the rows that see one of them.
static void add_transposed(int64_t keys, int64_t columns, int64_t rows, const float* a, int64_t lda, const float* b,
                           int64_t ldb, float* c, int64_t ldc, int64_t edge) {
  for (int64_t key = 0; key < keys; key += PANEL) {
    int64_t first = std::clamp<int64_t>(key - edge + 1, 0, rows);
    multiply_up_to(std::min<int64_t>(PANEL, keys - key), columns, rows - first, {a + first * lda + key, 1, lda},
                   b + first * ldb, ldb, c + key * ldc, ldc, true);
  }
}
