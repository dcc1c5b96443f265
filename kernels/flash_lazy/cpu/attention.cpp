// The C interface of the attention: threads over sequences and heads, and the gradients that heads share.

#include "attention.h"
#include "summary.h"

#ifndef FLASH_LAZY_SOURCES
#define FLASH_LAZY_SOURCES ""
#endif

extern "C" {

// Hash of the files that this library was built from; empty if it was not built by setup.py.
const char* flash_lazy_sources() { return FLASH_LAZY_SOURCES; }

// One call of `flash_lazy.lazy_attention`; the fields mirror `flash_lazy.call.Call`. Steps are in floats.
struct Call {
  int64_t batch, heads, kv_heads, rows, keys, width;
  int64_t sequences;
  const int64_t* sequence;  // [sequences, 5]: index in the batch, first row, rows, first key, keys; null: full ones
  const float *q, *k, *v;
  int64_t q_step[3], k_step[3], v_step[3], out_step[3];  // of batch, head and row
  const float *tau, *bias, *slopes;
  int64_t tau_columns, reach, window, context_length;
  const uint8_t* key_mask;  // [batch, keys], or null
  float scale;
  int32_t threshold, renormalise;
  int64_t threads;
};

// Forward: out is written, and sums and stats unless null; sums [3, batch, heads, rows], stats [4, batch, heads, rows].
void flash_lazy_forward(const Call* call, float* out, float* sums, float* stats);

// Summary of the rows and keys of each head in sequences with as many rows as keys, without a mask.
struct Summaries {
  int64_t first_keys, tile;
  float small;
  const uint8_t* counted;  // [batch, rows]
  float *sums, *first;     // [SUMS, batch, heads, rows], [batch, heads, rows, first_keys]
  double* columns;         // [batch, heads, keys]
  int32_t* touched;        // [batch, heads, tiles, tiles]
};
void flash_lazy_summarise(const Call* call, const Summaries* summaries);

// Gradients, of which those of keys outside every sequence are left as they are; the contiguous dlse
// [batch, heads, rows], dbias and dslopes may be null.
struct Gradients {
  const float *out, *dlse;
  float *q, *k, *v, *tau, *bias, *slopes;
  int64_t out_step[3], q_step[3], k_step[3], v_step[3];
};

// Backward: `gradients` of out and dlse to those of the inputs, with the sums that the forward pass wrote.
void flash_lazy_backward(const Call* call, const float* sums, const Gradients* gradients);
}

namespace {

struct Sequence {
  int64_t batch, row, rows, key, keys;
};

// What all heads of a call share.
class Geometry {
 public:
  explicit Geometry(const Call& call) : call(call), sequence(reinterpret_cast<const Sequence*>(call.sequence)) {
    if (!sequence) {
      for (int64_t b = 0; b < call.batch; b++) full_.push_back({b, 0, call.rows, 0, call.keys});
      sequence = full_.data();
    }
    for (int64_t i = 0; i < call.sequences; i++) longest_ = std::max(longest_, sequence[i].keys);
    build_strips();
    if (call.key_mask) build_masks();
  }

  const Call& call;
  const Sequence* sequence;

  bool shared_strip() const { return !call.bias && !call.slopes; }
  // Floats of one strip, of which the one at distance 0 is at `zero`.
  int64_t strip_size() const { return ::strip_size(longest_); }
  int64_t zero() const { return longest_ - 1; }
  int64_t window() const { return call.window ? call.window : longest_ + 1; }

  Head head(int64_t index, int64_t h) const {
    const Sequence& s = sequence[index];
    const int64_t kv = h / (call.heads / call.kv_heads);
    const bool masked = call.key_mask;
    return {
        {call.q + s.batch * call.q_step[0] + h * call.q_step[1] + s.row * call.q_step[2], call.q_step[2]},
        {call.k + s.batch * call.k_step[0] + kv * call.k_step[1] + s.key * call.k_step[2], call.k_step[2]},
        {call.v + s.batch * call.v_step[0] + kv * call.v_step[1] + s.key * call.v_step[2], call.v_step[2]},
        s.rows, s.keys, call.width, call.scale,
        strips_.data() + (shared_strip() ? 0 : h * strip_size()) + zero(),
        masked ? masks_.data() + index * (longest_ + 2 * W) : nullptr,
        masked ? seen_before_.data() + index * (longest_ + 1) : nullptr,
        window(), call.tau + h * call.tau_columns, call.tau_columns, call.context_length, call.threshold,
        call.renormalise};
  }
  // Index of a sequence's first row in [batch, heads, rows].
  int64_t place(int64_t index, int64_t h) const {
    return (sequence[index].batch * call.heads + h) * call.rows + sequence[index].row;
  }
  Rows<float> rows_of(float* x, const int64_t* step, int64_t index, int64_t h) const {
    return {x + sequence[index].batch * step[0] + h * step[1] + sequence[index].row * step[2], step[2]};
  }

 private:
  void build_strips() {
    const int64_t heads = shared_strip() ? 1 : call.heads;
    strips_.resize(heads * strip_size());
    for (int64_t h = 0; h < heads; h++)
      fill_strip(longest_, window(), call.bias ? call.bias + h * call.reach : nullptr, call.reach,
                 call.slopes ? call.slopes + h : nullptr, strips_.data() + h * strip_size() + zero());
  }
  void build_masks() {
    masks_.assign(call.sequences * (longest_ + 2 * W), -INF);
    seen_before_.assign(call.sequences * (longest_ + 1), 0);
    for (int64_t i = 0; i < call.sequences; i++) {
      const uint8_t* seen = call.key_mask + sequence[i].batch * call.keys + sequence[i].key;
      float* mask = masks_.data() + i * (longest_ + 2 * W);
      int64_t* before = seen_before_.data() + i * (longest_ + 1);
      for (int64_t key = 0; key < sequence[i].keys; key++) {
        if (seen[key]) mask[key] = 0;
        before[key + 1] = before[key] + (seen[key] != 0);
      }
    }
  }

  std::vector<Sequence> full_;
  int64_t longest_ = 0;
  std::vector<float> strips_, masks_;
  std::vector<int64_t> seen_before_;
};

// Parts into which each head's rows are divided: one if there are enough heads for the threads.
int64_t count_parts(int64_t heads, int64_t threads) {
  return heads >= 4 * threads || heads % threads == 0 ? 1 : threads;
}

// First row of a part, so that all have about the same work: under a causal mask it grows with the square of the rows.
int64_t first_row(const Sequence& s, int64_t part, int64_t parts) {
  if (part == 0 || part == parts) return part ? s.rows : 0;
  const double before = std::max<int64_t>(s.keys - s.rows, 0), rows = s.keys - before;  // without the blind ones
  const double row = std::sqrt(before * before + rows * (rows + 2 * before) * part / parts) - before;
  return s.rows - int64_t(rows) + std::min<int64_t>(int64_t(rows), int64_t(row / PANEL + 0.5) * PANEL);
}

RowSums sums_at(const Call& call, float* sums, int64_t place) {
  const int64_t size = call.batch * call.heads * call.rows;
  if (!sums) return {nullptr, nullptr, nullptr};
  return {sums + place, sums + size + place, sums + 2 * size + place};
}

// Adds the gradients of tau from the survivors of each row, in the order of the rows.
void reduce_tau(const Geometry& geometry, const std::vector<float>& survivors, float* dtau) {
  const Call& call = geometry.call;
  std::vector<double> total(call.heads * call.tau_columns);
  for (int64_t index = 0; index < call.sequences; index++)
    for (int64_t h = 0; h < call.heads; h++) {
      const Head head = geometry.head(index, h);
      const float* row = survivors.data() + geometry.place(index, h);
      for (int64_t r = std::max<int64_t>(0, -head.own(0)); r < head.rows; r++)
        total[h * call.tau_columns + head.tau_entry(r)] -= row[r];
    }
  std::copy(total.begin(), total.end(), dtau);
}

// Adds the gradients of bias and slopes from the strips of each task, in their order.
void reduce_strips(const Geometry& geometry, const std::vector<float>& strips, int64_t tasks, float* dbias,
                   float* dslopes) {
  const Call& call = geometry.call;
  const int64_t size = geometry.strip_size(), group = call.heads / call.kv_heads;
  std::vector<double> total(call.heads * size);
  for (int64_t task = 0; task < tasks; task++)
    for (int64_t g = 0; g < group; g++) {
      const int64_t h = task % call.kv_heads * group + g;
      const float* strip = strips.data() + (task * group + g) * size;
      for (int64_t i = 0; i < size; i++) total[h * size + i] += strip[i];
    }
  for (int64_t h = 0; h < call.heads; h++) {
    const double* at = total.data() + h * size + geometry.zero();
    if (dbias)
      for (int64_t d = 0; d < call.reach; d++) dbias[h * call.reach + d] = d <= geometry.zero() ? float(at[-d]) : 0;
    double slope = 0;
    for (int64_t d = 0; d <= geometry.zero(); d++) slope -= d * at[-d];
    if (dslopes) dslopes[h] = float(slope);
  }
}

}  // namespace

void flash_lazy_forward(const Call* given, float* out, float* sums, float* stats) {
  const Call& call = *given;
  const Geometry geometry(call);
  const int64_t parts = count_parts(call.sequences * call.heads, call.threads), heads = call.heads;
  const int64_t size = call.batch * call.heads * call.rows;
  run_tasks(call.threads, call.sequences * heads * parts, [&](int64_t task, Scratch& scratch) {
    const int64_t part = task % parts, h = task / parts % heads, index = task / parts / heads;
    const Head head = geometry.head(index, h);
    const int64_t place = geometry.place(index, h);
    const RowStats found{stats + place, stats + size + place, stats + 2 * size + place, stats + 3 * size + place};
    attend_forward(head, first_row(geometry.sequence[index], part, parts),
                   first_row(geometry.sequence[index], part + 1, parts), geometry.rows_of(out, call.out_step, index, h),
                   sums_at(call, sums, place), stats ? &found : nullptr, scratch.reserve(forward_size(head)));
  });
}

void flash_lazy_backward(const Call* given, const float* sums, const Gradients* gradients) {
  const Call& call = *given;
  const Gradients& to = *gradients;
  const Geometry geometry(call);
  const int64_t group = call.heads / call.kv_heads, padded = pad_width(call.width);
  const int64_t parts = count_parts(call.sequences * call.kv_heads, call.threads);
  const int64_t tasks = parts * call.sequences * call.kv_heads, strip_size = geometry.strip_size();
  const bool with_strips = to.bias || to.slopes;
  std::vector<float> survivors(call.batch * call.heads * call.rows), strips(with_strips ? tasks * group * strip_size : 0);
  std::vector<std::vector<float>> partial(parts > 1 ? tasks : 0);  // gradients of keys and values of each part

  const auto write = [&](int64_t index, int64_t kv, const float* dk, const float* dv, bool add) {
    const Sequence& s = geometry.sequence[index];
    for (int64_t key = 0; key < s.keys; key++) {
      float* k = to.k + s.batch * to.k_step[0] + kv * to.k_step[1] + (s.key + key) * to.k_step[2];
      float* v = to.v + s.batch * to.v_step[0] + kv * to.v_step[1] + (s.key + key) * to.v_step[2];
      for (int64_t i = 0; i < call.width; i++) k[i] = (add ? k[i] : 0) + dk[key * padded + i] * call.scale;
      for (int64_t i = 0; i < call.width; i++) v[i] = (add ? v[i] : 0) + dv[key * padded + i];
    }
  };
  run_tasks(call.threads, tasks, [&](int64_t task, Scratch& scratch) {
    const int64_t kv = task % call.kv_heads, part = task / call.kv_heads % parts, index = task / call.kv_heads / parts;
    const Head first = geometry.head(index, kv * group);
    const int64_t keys = first.keys * padded;
    float* memory = scratch.reserve(backward_size(first) + 2 * keys);
    float* found = memory + backward_size(first);
    std::fill(found, found + 2 * keys, 0.f);
    const PackedKeys packed = pack_keys(first, true, memory);
    for (int64_t g = 0; g < group; g++) {
      const int64_t h = kv * group + g, place = geometry.place(index, h);
      const Rows<float> grad = geometry.rows_of(const_cast<float*>(to.out), to.out_step, index, h);
      const HeadGradients own{geometry.rows_of(to.q, to.q_step, index, h), found, found + keys,
                              with_strips ? strips.data() + (task * group + g) * strip_size + geometry.zero() : nullptr,
                              survivors.data() + place};
      attend_backward(geometry.head(index, h), packed, first_row(geometry.sequence[index], part, parts),
                      first_row(geometry.sequence[index], part + 1, parts), {grad.data, grad.step},
                      to.dlse ? to.dlse + place : nullptr, sums_at(call, const_cast<float*>(sums), place), own,
                      memory + packed_size(first, true));
    }
    if (parts > 1) partial[task].assign(found, found + 2 * keys);
    else write(index, kv, found, found + keys, false);
  });
  for (int64_t task = 0; task < int64_t(partial.size()); task++) {
    const float* found = partial[task].data();
    write(task / call.kv_heads / parts, task % call.kv_heads, found, found + partial[task].size() / 2,
          task / call.kv_heads % parts > 0);
  }
  reduce_tau(geometry, survivors, to.tau);
  if (with_strips) reduce_strips(geometry, strips, tasks, to.bias, to.slopes);
}

void flash_lazy_summarise(const Call* given, const Summaries* summaries) {
  const Call& call = *given;
  const Summaries& all = *summaries;
  const Geometry geometry(call);
  const int64_t size = call.batch * call.heads * call.rows, tiles = (call.keys + all.tile - 1) / all.tile;
  std::fill_n(all.columns, size, 0.0);
  std::fill_n(all.touched, call.batch * call.heads * tiles * tiles, 0);
  run_tasks(call.threads, call.sequences * call.heads, [&](int64_t task, Scratch& scratch) {
    const int64_t h = task % call.heads, index = task / call.heads, place = geometry.place(index, h);
    const Head head = geometry.head(index, h);
    Summary to{{}, all.first + place * all.first_keys, all.columns + place, all.touched + task * tiles * tiles,
               all.first_keys, all.tile, tiles, all.small, all.counted + geometry.sequence[index].batch * call.rows};
    for (int i = 0; i < SUMS; i++) to.row[i] = all.sums + i * size + place;
    float* memory = scratch.reserve(forward_size(head));
    const PackedKeys packed = pack_keys(head, false, memory);
    for (int64_t row = 0; row < head.rows; row += ROWS)
      summarise_block(head, packed, row, std::min(ROWS, head.rows - row), to, memory + packed_size(head, false));
  });
}
