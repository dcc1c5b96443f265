// Statistics of the rows and keys of a head's weights, from the scores of one block at a time.
#pragma once

#include "attention.h"

constexpr int SUMS = 8;

// Where the statistics of one head of one sequence go; the fields are those of `AttentionSummary` in flash_lazy/cpu/summary.py.
struct Summary {
  float* row[SUMS];   // [rows] each: mass, total, theta, zeros, small, entropy, squares, score variance
  float* first;       // [rows, first_keys]
  double* columns;    // [keys], added to
  int32_t* touched;   // [tiles, tiles]: rows of each square tile with a weight, added to
  int64_t first_keys, tile, tiles;
  float small;
  const uint8_t* counted;  // [rows]: the others are 0
};

// log2 of positive normal numbers, relative error of the mantissa's part at most 1e-7.
INLINE Vec log2(Vec x) {
  Int bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  Int exponent = (bits - 0x3f3504f3) >> 23;  // so that the mantissa is sqrt(1/2) .. sqrt(2)
  bits -= exponent << 23;
  Vec mantissa;
  __builtin_memcpy(&mantissa, &bits, sizeof mantissa);
  Vec s = (mantissa - 1) / (mantissa + 1), square = s * s;
  Vec series = fill(1.f / 9) * square + 1.f / 7;
  series = series * square + 1.f / 5;
  series = series * square + 1.f / 3;
  series = series * square + 1;
  return __builtin_convertvector(exponent, Vec) + 2 * LOG2E * s * series;
}

// Mean and sum of squared deviations, merged tile by tile (Chan et al. 1979): one sum of squares would cancel.
struct Spread {
  double n = 0, mean = 0, squares = 0;
  void add(double count, double total, double deviations) {
    if (!count) return;
    const double shift = total / count - mean, all = n + count;
    squares += deviations + shift * shift * n * count / all;
    mean += shift * count / all;
    n = all;
  }
};

INLINE Vec indices(int64_t from) {
  Vec index;
  for (int i = 0; i < W; i++) index[i] = float(from + i);
  return index;
}

// The spread of the visible scores x of a row's columns [first, end); columns beyond are hidden.
static void add_scores(const float* x, int64_t first, int64_t end, int64_t columns, Spread& spread) {
  Vec total{}, count{}, deviations{};
  for (int64_t j = 0; j < columns; j += W) {
    Int seen = (indices(j) >= float(first)) & (indices(j) < float(end));
    total += select(seen, load(x + j), Vec{});
    count += select(seen, fill(1), Vec{});
  }
  const float n = sum(count), mean = n ? sum(total) / n : 0;
  for (int64_t j = 0; j < columns; j += W) {
    Int seen = (indices(j) >= float(first)) & (indices(j) < float(end));
    Vec deviation = select(seen, load(x + j) - mean, Vec{});
    deviations += deviation * deviation;
  }
  spread.add(n, sum(total), sum(deviations));
}

// Summary of `rows` <= ROWS rows from `row` on of a sequence with as many rows as keys. memory: tiles_size floats.
static void summarise_block(const Head& head, const PackedKeys& packed, int64_t row, int64_t rows, const Summary& to,
                            float* memory) {
  const Tiles tiles(head, row, rows);
  const int64_t count = tiles.count();
  float top[ROWS];
  Spread spread[ROWS];
  std::fill(top, top + rows, LOWEST);
  for (int64_t tile = 0; tile < count; tile++) {
    float* x = memory + tile * ROWS * STEP;
    const int64_t start = tiles.start(tile);
    multiply_seen(rows, tiles.columns(tile), head.width, {head.q[row], head.q.step, 1}, packed.k_columns + start,
                  packed.step, x, STEP, tiles.edge(tile));
    for (int64_t m = 0; m < rows; m++) {
      const int64_t seen = tiles.seen(tile, m);
      top[m] = std::max(top[m], finish_scores(head, row + m, start, seen, x + m * STEP));
      add_scores(x + m * STEP, head.first_seen(row + m) - start, head.own(row + m) + 1 - start, seen, spread[m]);
    }
  }
  for (int64_t m = 0; m < rows; m++) {
    const int64_t own = head.own(row + m), first_seen = head.first_seen(row + m), n = own + 1 - first_seen;
    if (!to.counted[row + m]) {
      for (float* field : to.row) field[row + m] = 0;
      std::fill_n(to.first + (row + m) * to.first_keys, to.first_keys, 0.f);
      continue;
    }
    Vec sums{};
    for (int64_t tile = 0; tile < count; tile++) {
      float* x = memory + (tile * ROWS + m) * STEP;
      for (int64_t j = 0; j < tiles.seen(tile, m); j += W) {
        Vec e = exp2(load(x + j) - top[m]);
        store(x + j, e);
        sums += e;
      }
    }
    const float total = std::max(sum(sums), 1.f), cut = head.cut(row + m, total);
    Vec mass{}, squares{}, logs{}, alive{};
    for (int64_t tile = 0; tile < count; tile++) {
      float* x = memory + (tile * ROWS + m) * STEP;
      const int64_t seen = tiles.seen(tile, m), start = tiles.start(tile);
      for (int64_t j = 0; j < seen; j += W) store(x + j, relu(load(x + j) - cut));
      if (cut < 0) clear_hidden(head, row + m, start, seen, x);
      for (int64_t j = 0; j < seen; j += W) {
        Vec w = load(x + j);
        mass += w, squares += w * w;
        logs += select(w > 0, w * log2(w), Vec{});
        alive += select(w > 0, fill(1), Vec{});
      }
    }
    const float whole = sum(mass), divisor = head.renormalise ? (whole > 0 ? whole : 1) : total;
    Vec large{};
    for (int64_t tile = 0; tile < count; tile++) {
      const float* x = memory + (tile * ROWS + m) * STEP;
      const int64_t start = tiles.start(tile);
      for (int64_t j = 0; j < tiles.seen(tile, m); j += W)
        large += select(load(x + j) / divisor > to.small, fill(1), Vec{});
      for (int64_t j = 0; j < std::min(tiles.seen(tile, m), own + 1 - start); j++)
        to.columns[start + j] += x[j] / divisor;
      for (int64_t j = 0; j < std::min(tiles.seen(tile, m), own + 1 - start); j += to.tile) {
        const int64_t end = std::min(j + to.tile, std::min(tiles.seen(tile, m), own + 1 - start));
        bool any = false;
        for (int64_t i = j; i < end; i++) any |= x[i] != 0;
        to.touched[(row + m) / to.tile * to.tiles + (start + j) / to.tile] += any;
      }
    }
    for (int64_t key = 0; key < to.first_keys; key++) {
      const bool seen = key <= own && key >= tiles.first;
      to.first[(row + m) * to.first_keys + key] = seen ? memory[m * STEP + key - tiles.first] / divisor : 0;
    }
    const float nats = whole > 0 ? (std::log2(whole) - sum(logs) / whole) * LN2 : 0;
    const float values[SUMS] = {
        whole / total,
        whole / divisor,
        cut / total,
        n - sum(alive),
        n - sum(large),
        nats,
        whole > 0 ? sum(squares) / whole / whole : 0,
        float(spread[m].squares / std::max<double>(n - 1, 1) * LN2 * LN2),
    };
    for (int i = 0; i < SUMS; i++) to.row[i][row + m] = values[i];
  }
}
