// Attention of one query head over one sequence: blocks of query rows, tiles of keys.
//
// A row's softmax is never divided out: with e = 2^(score - largest) and its row sum `total`, weights are
// max(e - t, 0) for t = tau * total / divisor, and the output's row is divided instead. tau * total comes first, so that
// equal scores at tau = 1 give e = t = 1 exactly.
#pragma once

#include <cstring>

#include "products.h"
#include "threads.h"

constexpr int64_t ROWS = 48;   // query rows of a block
constexpr int64_t TILE = 128;  // keys of a tile; those without a surviving weight skip the products with values
constexpr int64_t STEP = TILE + W;  // distance of a tile's rows: with a power of two they would share lines of the cache
constexpr int64_t FEW = 8;     // query rows up to which keys are read in place, not transposed first

// In the order of `THRESHOLDS` in call.py.
enum Threshold { PER_QUERY, SEQ_LEN, PER_TOKEN, CONSTANT };

// Rows of a matrix in memory: row i starts at data + i * step.
template <class Float>
struct Rows {
  Float* data;
  int64_t step;
  Float* operator[](int64_t row) const { return data + row * step; }
};

// One query head of one sequence. Query row r stands at key own(r), counted from 0; rows before the first key are blind.
struct Head {
  Rows<const float> q, k, v;
  int64_t rows, keys, width;
  float scale;
  const float* strip;         // added to the score (base 2) at distance d: strip[-d]; -inf where a row sees nothing
  const float* mask;          // added to the scores of a key: 0 or -inf, for whole vectors of keys; or null
  const int64_t* seen_before;  // with a mask, the number of unmasked keys before each key
  int64_t window;
  const float* tau;
  int64_t tau_columns, context_length;
  int32_t threshold, renormalise;

  int64_t own(int64_t row) const { return keys - rows + row; }
  int64_t first_seen(int64_t row) const { return std::max<int64_t>(own(row) - window + 1, 0); }
  // Keys before the first one that any row sees.
  int64_t unseen() const { return first_seen(std::clamp<int64_t>(rows - keys, 0, rows)); }
  bool has_hidden() const { return mask || unseen() > 0; }
  // Whether no row sees a key, which may then hold anything.
  bool hidden(int64_t key) const { return key < unseen() || (mask && mask[key] < 0); }
  int64_t count_seen(int64_t row) const {
    int64_t first = first_seen(row), end = own(row) + 1;
    return mask ? seen_before[end] - seen_before[first] : end - first;
  }
  // Of a row that is not blind: unmasked keys before its own one, counted from 0.
  int64_t position(int64_t row) const { return mask ? std::max<int64_t>(seen_before[own(row) + 1] - 1, 0) : own(row); }
  int64_t tau_entry(int64_t row) const { return threshold == PER_TOKEN ? std::min(position(row), tau_columns - 1) : 0; }
  float divisor(int64_t row) const {
    if (threshold == SEQ_LEN) return float(context_length);
    return threshold == CONSTANT ? 1.f : float(std::max<int64_t>(count_seen(row), 1));
  }
  // Threshold of a row's e, whose sum is total.
  float cut(int64_t row, float total) const { return tau[tau_entry(row)] * total / divisor(row); }
};

// Floats of a strip for up to `keys` keys, of which the one at distance 0 is at keys - 1.
INLINE int64_t strip_size(int64_t keys) { return keys + PANEL + 2 * W; }

// Fills a strip from the value at distance 0 on: bias [reach] and slope may be null.
static void fill_strip(int64_t keys, int64_t window, const float* bias, int64_t reach, const float* slope,
                       float* strip) {
  const int64_t seen = std::min(keys, window);
  std::fill(strip - keys + 1, strip - keys + 1 + strip_size(keys), -INF);
  for (int64_t d = 0; d < seen; d++) strip[-d] = slope ? -*slope * float(d) : 0;
  for (int64_t d = 0; bias && d < std::min(reach, seen); d++) strip[-d] += bias[d];
  for (int64_t d = 0; d < seen; d++) strip[-d] *= LOG2E;
}

// What the forward pass keeps of each row, [rows]: largest score (base 2), sum of e, and the output's
// divisor: sum of e, or of max(e - t, 0) to renormalise.
struct RowSums {
  float *largest, *total, *mass;
};

// Statistics of each row, [rows], or null; see `flash_lazy.Stats`.
struct RowStats {
  float *lse, *mass, *first_weight, *zeros;
};

// Keys and values of a sequence as products read them: columns padded to whole vectors, hidden keys 0.
struct PackedKeys {
  const float *k_columns, *v_columns;  // transposed, [width, step]
  int64_t step;
  Rows<const float> k, v;  // [keys, padded width]
};

INLINE int64_t pad_width(int64_t width) { return round_up(width, W); }

// to[column * step + key] = from[key][column] from the first tile that is read on; hidden keys and the padding become 0.
static void transpose(const Head& head, Rows<const float> from, float* to, int64_t step) {
  for (int64_t block = head.unseen() / TILE * TILE; block < head.keys; block += W) {
    const float* rows[W];
    for (int64_t i = 0; i < W; i++)
      rows[i] = block + i < head.keys && !head.hidden(block + i) ? from[block + i] : nullptr;
    for (int64_t column = 0; column < head.width; column++)
      for (int64_t i = 0; i < W; i++) to[column * step + block + i] = rows[i] ? rows[i][column] : 0.f;
  }
}

static bool needs_copy(const Head& head) { return head.has_hidden() || head.width % W; }

// The rows themselves if products can read them, else a copy.
static Rows<const float> pad_rows(const Head& head, Rows<const float> from, float* to) {
  if (!needs_copy(head)) return from;
  const int64_t padded = pad_width(head.width);
  for (int64_t key = head.unseen() / TILE * TILE; key < head.keys; key++) {
    float* row = to + key * padded;
    const bool hidden = head.hidden(key);
    for (int64_t i = 0; i < padded; i++) row[i] = i < head.width && !hidden ? from[key][i] : 0.f;
  }
  return {to, padded};
}

INLINE int64_t key_step(const Head& head) { return round_up(head.keys, W) + W; }

// Floats of memory that pack_keys needs.
static size_t packed_size(const Head& head, bool backward) {
  const int64_t copy = needs_copy(head) ? head.keys * pad_width(head.width) : 0;
  return (backward ? 2 : 1) * key_step(head) * head.width + copy;
}

// The forward pass needs the keys transposed and the values as they are, the backward pass also the reverse.
static PackedKeys pack_keys(const Head& head, bool backward, float* memory) {
  const int64_t step = key_step(head), transposed = step * head.width;
  transpose(head, head.k, memory, step);
  if (!backward) return {memory, nullptr, step, {}, pad_rows(head, head.v, memory + transposed)};
  transpose(head, head.v, memory + transposed, step);
  return {memory, memory + transposed, step, pad_rows(head, head.k, memory + 2 * transposed), {}};
}

// The tiles of keys that a block of rows sees.
struct Tiles {
  int64_t first, end, own;
  Tiles(const Head& head, int64_t row, int64_t rows)
      : first(head.first_seen(row) / TILE * TILE), end(head.own(row + rows - 1) + 1), own(head.own(row)) {}
  int64_t count() const { return (end - first + TILE - 1) / TILE; }
  int64_t start(int64_t tile) const { return first + tile * TILE; }
  int64_t keys(int64_t tile) const { return std::min(TILE, end - start(tile)); }
  int64_t columns(int64_t tile) const { return round_up(keys(tile), W); }
  // Row m of the block sees the tile's columns below edge + m.
  int64_t edge(int64_t tile) const { return own + 1 - start(tile); }
  int64_t seen(int64_t tile, int64_t m) const { return seen_columns(edge(tile), m / PANEL * PANEL, columns(tile)); }
};

// Whether both passes read keys in place; their scores must have the same bits.
INLINE bool reads_in_place(const Head& head) { return head.rows <= FEW; }

static size_t tiles_size(const Head& head) { return ((head.keys + TILE - 1) / TILE + 1) * ROWS * STEP; }

// Products of a row with W keys, read in place.
INLINE void multiply_keys(const float* q, const float* const* k, int64_t width, float* products) {
  const int64_t whole = width / W * W;
  Vec totals[W]{};
  for (int64_t i = 0; i < whole; i += W)
    for (int n = 0; n < W; n++) totals[n] += load(q + i) * load(k[n] + i);
  store(products, sum_each(totals));
  for (int n = 0; n < W && whole < width; n++)
    for (int64_t i = whole; i < width; i++) products[n] += q[i] * k[n][i];
}

// Products of rows with the keys of a tile that are read in place; a hidden key counts as 0.
static void multiply_in_place(const Head& head, int64_t row, int64_t rows, const Tiles& tiles, int64_t tile,
                              float* scores) {
  const int64_t start = tiles.start(tile);
  const bool some_hidden = head.has_hidden();
  for (int64_t j = 0; j < tiles.columns(tile); j += W) {
    const float* k[W];
    Int seen = Int{} - 1;
    const int64_t key = start + j;
    for (int n = 0; n < W; n++) k[n] = head.k[key + n];
    if (some_hidden || key + W > head.keys)
      for (int n = 0; n < W; n++)
        if (key + n >= head.keys || head.hidden(key + n)) k[n] = head.q[row], seen[n] = 0;
    for (int64_t m = 0; m < rows; m++) {
      if (j >= tiles.seen(tile, m)) continue;
      float* products = scores + m * STEP + j;
      multiply_keys(head.q[row + m], k, head.width, products);
      store(products, select(seen, load(products), Vec{}));
    }
  }
}

// Adds the values of the listed keys, for VECTORS vectors of a row's output from column i on.
template <int VECTORS>
INLINE void add_values(Rows<const float> v, const int32_t* listed, int64_t count, const float* weights, int64_t i,
                       float* out) {
  Vec total[VECTORS];
  for (int n = 0; n < VECTORS; n++) total[n] = load(out + i + n * W);
  for (int64_t number = 0; number < count; number++) {
    const int32_t j = listed[number];
    for (int n = 0; n < VECTORS; n++) total[n] += weights[j] * load(v[j] + i + n * W);
  }
  for (int n = 0; n < VECTORS; n++) store(out + i + n * W, total[n]);
}

// The product of weights with values that are read in place.
static void add_in_place(const Head& head, int64_t rows, const Tiles& tiles, int64_t tile, const float* weights,
                         float* out) {
  const Rows<const float> v{head.v[tiles.start(tile)], head.v.step};
  const int64_t padded = pad_width(head.width);
  for (int64_t m = 0; m < rows; m++, weights += STEP, out += padded) {
    const int64_t keys = std::min(tiles.keys(tile), tiles.seen(tile, m));
    int32_t listed[TILE];  // without a branch, which would be mispredicted: the keys that have a weight
    int64_t count = 0, i = 0;
    for (int32_t j = 0; j < keys; j++) listed[count] = j, count += weights[j] != 0;
    for (; i + 4 * W <= head.width; i += 4 * W) add_values<4>(v, listed, count, weights, i, out);
    for (; i + W <= head.width; i += W) add_values<1>(v, listed, count, weights, i, out);
    for (int64_t number = 0; i < head.width && number < count; number++)
      for (int64_t rest = i; rest < head.width; rest++) out[rest] += weights[listed[number]] * v[listed[number]][rest];
  }
}

// Writes the scores of a row over its products with keys; returns the largest.
INLINE float finish_scores(const Head& head, int64_t row, int64_t start, int64_t columns, float* x) {
  const float* strip = head.strip - head.own(row) + start;
  const float factor = head.scale * LOG2E;
  Vec top = fill(-INF);
  for (int64_t j = 0; j < columns; j += W) {
    Vec score = load(x + j) * factor + load(strip + j);
    if (head.mask) score += load(head.mask + start + j);
    store(x + j, score);
    top = larger(score, top);
  }
  return largest(top);
}

// Whether no weight of a tile survives. The margin exceeds the rounding of e, so that no bit depends on the answer.
INLINE bool is_cut(float largest_e, float cut) { return largest_e * (1 + 0x1p-20f) <= cut; }

// With a negative threshold, max(e - t, 0) gives hidden keys weight: clear them.
static void clear_hidden(const Head& head, int64_t row, int64_t start, int64_t columns, float* x) {
  const int64_t first = head.first_seen(row) - start, end = head.own(row) + 1 - start;
  for (int64_t j = 0; j < columns; j++)
    if (j < first || j >= end || (head.mask && head.mask[start + j] < 0)) x[j] = 0;
}

// Output of `rows` <= ROWS rows from `row` on, none of them blind by position. memory: tiles_size + ROWS * padded width.
static void attend_block(const Head& head, const PackedKeys& packed, int64_t row, int64_t rows, Rows<float> out,
                         RowSums sums, const RowStats* stats, float* memory) {
  const Tiles tiles(head, row, rows);
  const int64_t count = tiles.count(), padded = pad_width(head.width);
  float* result = memory;
  float* weights = memory + ROWS * padded;
  float top[ROWS], total[ROWS], cut[ROWS], mass[ROWS], alive[ROWS], first_weight[ROWS];
  bool sees[ROWS];
  std::vector<float> tile_largest(count * rows), tile_top(count * rows);  // of each tile's scores, and up to it
  for (int64_t m = 0; m < rows; m++) {
    top[m] = LOWEST, total[m] = mass[m] = alive[m] = first_weight[m] = 0;
    sees[m] = head.count_seen(row + m) > 0;
  }
  for (int64_t tile = 0; tile < count; tile++) {
    float* e = weights + tile * ROWS * STEP;
    if (reads_in_place(head))
      multiply_in_place(head, row, rows, tiles, tile, e);
    else
      multiply_seen(rows, tiles.columns(tile), head.width, {head.q[row], head.q.step, 1},
                    packed.k_columns + tiles.start(tile), packed.step, e, STEP, tiles.edge(tile));
    for (int64_t m = 0; m < rows; m++) {
      float* x = e + m * STEP;
      const int64_t seen = sees[m] ? tiles.seen(tile, m) : 0;
      const float highest = finish_scores(head, row + m, tiles.start(tile), seen, x), before = top[m];
      top[m] = highest > before ? highest : before;
      Vec added{};
      for (int64_t j = 0; j < seen; j += W) {
        Vec value = exp2(load(x + j) - top[m]);
        store(x + j, value);
        added += value;
      }
      for (int64_t j = seen; j < tiles.columns(tile); j += W) store(x + j, Vec{});
      total[m] = (top[m] > before ? total[m] * scalar_exp2(before - top[m]) : total[m]) + sum(added);
      tile_largest[tile * rows + m] = highest, tile_top[tile * rows + m] = top[m];
    }
  }
  for (int64_t m = 0; m < rows; m++) {
    total[m] = total[m] < 1 ? 1 : total[m];  // only of a row without a finite score
    cut[m] = head.cut(row + m, total[m]);
  }
  std::fill(result, result + rows * padded, 0.f);
  for (int64_t tile = 0; tile < count; tile++) {
    float* e = weights + tile * ROWS * STEP;
    float factor[ROWS];
    bool any = false;
    for (int64_t m = 0; m < rows; m++) {
      factor[m] = scalar_exp2(tile_top[tile * rows + m] - top[m]);
      any |= sees[m] && !is_cut(scalar_exp2(tile_largest[tile * rows + m] - top[m]), cut[m]);
    }
    if (!any) continue;
    for (int64_t m = 0; m < rows; m++) {
      float* x = e + m * STEP;
      const int64_t seen = sees[m] ? tiles.seen(tile, m) : 0;
      Vec kept{}, number{};
      for (int64_t j = 0; j < seen; j += W) {
        Vec weight = relu(load(x + j) * factor[m] - cut[m]);
        store(x + j, weight);
        kept += weight;
        if (stats) number += select(weight <= 0, Vec{}, fill(1));
      }
      if (cut[m] < 0 && seen) {
        clear_hidden(head, row + m, tiles.start(tile), seen, x);
        kept = number = Vec{};
        for (int64_t j = 0; j < seen; j += W) {
          kept += load(x + j);
          number += select(load(x + j) <= 0, Vec{}, fill(1));
        }
      }
      mass[m] += sum(kept);
      if (stats) alive[m] += sum(number);
      if (stats && tiles.start(tile) == 0 && head.first_seen(row + m) == 0 && seen) first_weight[m] = x[0];
    }
    if (reads_in_place(head))
      add_in_place(head, rows, tiles, tile, e, result);
    else
      add_seen_keys(rows, padded, tiles.keys(tile), {e, STEP, 1}, packed.v[tiles.start(tile)], packed.v.step, result,
                    padded, tiles.edge(tile));
  }
  for (int64_t m = 0; m < rows; m++) {
    const float divisor = !head.renormalise ? total[m] : mass[m] > 0 || mass[m] != mass[m] ? mass[m] : 1;
    for (int64_t i = 0; i < head.width; i++) out[row + m][i] = result[m * padded + i] / divisor;
    if (sums.largest) sums.largest[row + m] = top[m], sums.total[row + m] = total[m], sums.mass[row + m] = divisor;
    if (!stats) continue;
    const bool finite = top[m] > LOWEST && top[m] < INF, undefined = total[m] != total[m] && top[m] < INF;
    stats->lse[row + m] = undefined ? total[m] : finite ? (top[m] + std::log2(total[m])) * LN2 : top[m] > 0 ? INF : -INF;
    stats->mass[row + m] = mass[m] / total[m];
    stats->first_weight[row + m] = first_weight[m] / divisor;
    stats->zeros[row + m] = std::max(float(head.count_seen(row + m)) - alive[m], 0.f);
  }
}

// Output and sums of rows without a key, which are 0.
static void blank_rows(const Head& head, int64_t rows, Rows<float> out, RowSums sums, const RowStats* stats) {
  for (int64_t row = 0; row < rows; row++) {
    std::fill(out[row], out[row] + head.width, 0.f);
    if (sums.largest) sums.largest[row] = LOWEST, sums.total[row] = sums.mass[row] = 1;
    if (stats) stats->lse[row] = -INF, stats->mass[row] = stats->first_weight[row] = stats->zeros[row] = 0;
  }
}

static size_t forward_size(const Head& head) {
  return packed_size(head, false) + tiles_size(head) + ROWS * pad_width(head.width);
}

// Output of the rows [row, end). memory: forward_size floats.
static void attend_forward(const Head& head, int64_t row, int64_t end, Rows<float> out, RowSums sums,
                           const RowStats* stats, float* memory) {
  const int64_t blind = std::clamp<int64_t>(-head.own(0), 0, head.rows);
  if (row < blind) blank_rows(head, row = std::min(blind, end), out, sums, stats);
  if (row >= end) return;
  PackedKeys packed{};
  if (!reads_in_place(head)) packed = pack_keys(head, false, memory);
  for (; row < end; row += ROWS)
    attend_block(head, packed, row, std::min(ROWS, end - row), out, sums, stats,
                 memory + packed_size(head, false));
}

// Gradients of one head's inputs: dk and dv [keys, padded width] are added to, dq's rows are written.
struct HeadGradients {
  Rows<float> dq;
  float *dk, *dv;     // the caller multiplies dk by the scale
  float* strip;       // added to at [-distance], like the head's strip; or null
  float* survivors;   // [rows]: sum over j of m_ij dp_ij, over the divisor of tau
};

static size_t backward_block_size(const Head& head) {
  return 2 * tiles_size(head) + ROWS * STEP + 3 * ROWS * pad_width(head.width) + head.keys + PANEL + 2 * W;
}

// Gradients through a block of rows, none of them blind by position. dlse: gradient of the log-sum-exp [rows], or null.
static void backpropagate_block(const Head& head, const PackedKeys& packed, int64_t row, int64_t rows,
                                Rows<const float> grad, const float* dlse, RowSums sums, const HeadGradients& to,
                                float* memory) {
  const Tiles tiles(head, row, rows);
  const int64_t count = tiles.count(), padded = pad_width(head.width);
  float *q = memory, *d_out = q + ROWS * padded, *dq = d_out + ROWS * padded, *w = dq + ROWS * padded;
  float *e_tiles = w + ROWS * STEP, *y_tiles = e_tiles + tiles_size(head);
  const int64_t farthest = tiles.own + rows - 1 - tiles.first;
  float* strip = y_tiles + tiles_size(head) + farthest;  // as to.strip, of this block: two short sums err less
  float cut[ROWS], mean[ROWS];
  bool sees[ROWS];
  Vec survivors[ROWS], deltas[ROWS], means[ROWS];
  for (int64_t m = 0; m < rows; m++) {
    sees[m] = head.count_seen(row + m) > 0;
    cut[m] = head.cut(row + m, sums.total[row + m]);
    survivors[m] = deltas[m] = means[m] = Vec{};
    for (int64_t i = 0; i < padded; i++) {
      const bool inside = i < head.width && sees[m];
      q[m * padded + i] = inside ? head.q[row + m][i] : 0;
      d_out[m * padded + i] = inside ? grad[row + m][i] / sums.mass[row + m] : 0;
    }
  }
  std::vector<char> dead(count);
  for (int64_t tile = 0; tile < count; tile++) {
    const int64_t start = tiles.start(tile), edge = tiles.edge(tile), columns = tiles.columns(tile);
    float *e = e_tiles + tile * ROWS * STEP, *y = y_tiles + tile * ROWS * STEP;
    if (reads_in_place(head))
      multiply_in_place(head, row, rows, tiles, tile, e);
    else
      multiply_seen(rows, columns, head.width, {q, padded, 1}, packed.k_columns + start, packed.step, e, STEP, edge);
    Int any{};
    for (int64_t m = 0; m < rows; m++) {
      float* x = e + m * STEP;
      const int64_t seen = sees[m] ? tiles.seen(tile, m) : 0;
      const float* strip = head.strip - head.own(row + m) + start;
      const float factor = head.scale * LOG2E, top = sums.largest[row + m];
      for (int64_t j = 0; j < seen; j += W) {
        Vec score = load(x + j) * factor + load(strip + j);
        if (head.mask) score += load(head.mask + start + j);
        Vec value = exp2(score - top);
        store(x + j, value);
        any |= ~(value <= cut[m]);
      }
      for (int64_t j = seen; j < columns; j += W) store(x + j, Vec{});
    }
    int32_t found = 0;
    for (int i = 0; i < W; i++) found |= any[i];
    dead[tile] = !found;
    if (dead[tile]) continue;
    multiply_seen(rows, columns, head.width, {d_out, padded, 1}, packed.v_columns + start, packed.step, y, STEP,
                  edge);
    for (int64_t m = 0; m < rows; m++) {
      const float* x = e + m * STEP;
      float *gradient = y + m * STEP, *weight = w + m * STEP;
      const int64_t seen = sees[m] ? tiles.seen(tile, m) : 0;
      for (int64_t j = 0; j < seen; j += W) {
        Vec value = load(x + j);
        store(weight + j, relu(value - cut[m]));
        store(gradient + j, select(value <= cut[m], Vec{}, load(gradient + j)));
      }
      if (cut[m] < 0 && seen) {
        clear_hidden(head, row + m, start, seen, weight);
        clear_hidden(head, row + m, start, seen, gradient);
      }
      for (int64_t j = 0; j < seen; j += W) {
        Vec value = load(gradient + j);
        survivors[m] += value;
        deltas[m] += load(x + j) * value;
        if (head.renormalise) means[m] += load(weight + j) / sums.mass[row + m] * value;  // the lone weight's is 1
      }
      for (int64_t j = seen; j < columns; j += W) store(weight + j, Vec{}), store(gradient + j, Vec{});
    }
    add_transposed(tiles.keys(tile), padded, rows, w, STEP, d_out, padded, to.dv + start * padded, padded, edge);
  }
  if (head.renormalise) {  // weights divided by their sum: the gradient of a surviving weight loses its weighted mean
    for (int64_t m = 0; m < rows; m++) {
      mean[m] = sum(means[m]);
      survivors[m] = deltas[m] = Vec{};
    }
    for (int64_t tile = 0; tile < count; tile++) {
      if (dead[tile]) continue;
      for (int64_t m = 0; m < rows; m++) {
        const float* x = e_tiles + tile * ROWS * STEP + m * STEP;
        float* gradient = y_tiles + tile * ROWS * STEP + m * STEP;
        const int64_t seen = sees[m] ? tiles.seen(tile, m) : 0;
        for (int64_t j = 0; j < seen; j += W)
          store(gradient + j, select(load(x + j) <= cut[m], Vec{}, load(gradient + j) - mean[m]));
        if (cut[m] < 0 && seen) clear_hidden(head, row + m, tiles.start(tile), seen, gradient);
        for (int64_t j = 0; j < seen; j += W) {
          survivors[m] += load(gradient + j);
          deltas[m] += load(x + j) * load(gradient + j);
        }
      }
    }
  }
  float delta[ROWS], shift[ROWS];  // apart: in a row of one key the gradient loses delta to the last bit
  for (int64_t m = 0; m < rows; m++) {
    const float total = sums.total[row + m];
    delta[m] = sum(deltas[m]) / total;
    shift[m] = dlse && sees[m] ? dlse[row + m] / total : 0;
    to.survivors[row + m] = sees[m] ? sum(survivors[m]) * total / head.divisor(row + m) : 0;
  }
  if (to.strip) std::fill(strip - farthest, strip + PANEL + W, 0.f);
  std::fill(dq, dq + rows * padded, 0.f);
  for (int64_t tile = 0; tile < count; tile++) {
    const int64_t start = tiles.start(tile), edge = tiles.edge(tile);
    float* ds = e_tiles + tile * ROWS * STEP;
    for (int64_t m = 0; m < rows; m++) {
      float* x = ds + m * STEP;
      const float* gradient = y_tiles + tile * ROWS * STEP + m * STEP;
      float* at = strip - head.own(row + m) + start;
      const int64_t seen = sees[m] ? tiles.seen(tile, m) : 0;
      for (int64_t j = 0; j < seen; j += W) {
        Vec value = load(x + j) * ((dead[tile] ? Vec{} : load(gradient + j)) - delta[m] + shift[m]);
        store(x + j, value);
        if (to.strip) store(at + j, load(at + j) + value);
      }
    }
    add_seen_keys(rows, padded, tiles.keys(tile), {ds, STEP, 1}, packed.k[start], packed.k.step, dq, padded, edge);
    add_transposed(tiles.keys(tile), padded, rows, ds, STEP, q, padded, to.dk + start * padded, padded, edge);
  }
  for (int64_t d = 0; to.strip && d <= farthest; d++) to.strip[-d] += strip[-d];
  for (int64_t m = 0; m < rows; m++)
    for (int64_t i = 0; i < head.width; i++) to.dq[row + m][i] = dq[m * padded + i] * head.scale;
}

static size_t backward_size(const Head& head) { return packed_size(head, true) + backward_block_size(head); }

// Gradients through the rows [row, end). packed: of the head's keys. memory: backward_block_size floats.
static void attend_backward(const Head& head, const PackedKeys& packed, int64_t row, int64_t end,
                            Rows<const float> grad, const float* dlse, RowSums sums, const HeadGradients& to,
                            float* memory) {
  const int64_t blind = std::clamp<int64_t>(-head.own(0), 0, end);
  for (; row < blind; row++) {
    std::fill(to.dq[row], to.dq[row] + head.width, 0.f);
    to.survivors[row] = 0;
  }
  for (; row < end; row += ROWS)
    backpropagate_block(head, packed, row, std::min(ROWS, end - row), grad, dlse, sums, to, memory);
}
