// A decoder of pre-norm blocks (RMSNorm, attention, SwiGLU) with residual connections, for small models: a few sequences
// at a time pass through all layers, forward and backward, so that their activations stay in cache.

#include "attention.h"

extern "C" {

enum Weight { ATTENTION_NORM, QUERY, KEY, VALUE, OUT, MLP_NORM, GATE, UP, DOWN, TAU, BIAS, SLOPES, WEIGHTS };

// Attention of one layer, as in `flash_lazy.lazy_attention`; window 0: none.
struct LayerSettings {
  int64_t tau_columns, reach, window, context_length;
  int32_t threshold, renormalise;
};

struct Decoder {
  int64_t layers, batch, length, d_model, d_ff, heads, kv_heads, head_dim, vocabulary, threads;
  const LayerSettings* settings;  // [layers]
  // [layers * WEIGHTS + 2]: those of each layer by `Weight`, then the last norm and the head; matrices [out, in] as in
  // torch. Bias and slopes may be null. d_model, d_ff and heads * head_dim are multiples of 16.
  const float* const* weights;
  const float *cosine, *sine;  // of the rotation of dimensions (m, m + head_dim / 2), [length, head_dim / 2]; or null
  const float* x;              // embeddings [batch, length, d_model]
  float eps;
};

// Writes the residual stream after the last block, [batch, length, d_model], and unless null stats
// [layers, 4, batch, heads, length].
void flash_lazy_decoder_forward(const Decoder* decoder, float* residual, float* stats);

// Mean loss of the targets [batch, length] that are at least 0, in nats; writes its gradients by the embeddings, dx, and
// by the weights, [layers * WEIGHTS + 2], of which any may be null.
double flash_lazy_decoder_step(const Decoder* decoder, const int64_t* targets, float* dx, float* const* gradients);
}

namespace {

constexpr int64_t HEAD_TOKENS = 128;  // tokens whose logits are in memory at a time
constexpr int64_t GROUP_TOKENS = 128;  // tokens up to which several sequences pass together

// Takes parts of one buffer, each aligned to a cache line; without a buffer, only counts.
struct Arena {
  float* next;
  size_t used = 0;
  float* take(size_t size) {
    size = round_up(size, 16);
    float* taken = next;
    if (next) next += size;
    used += size;
    return taken;
  }
};

// y = x / rms(x) * gain by row; inverse [rows] is 1 / rms.
void norm_forward(int64_t rows, int64_t width, const float* x, const float* gain, float eps, float* y, float* inverse) {
  for (int64_t row = 0; row < rows; row++, x += width, y += width) {
    Vec squares{};
    for (int64_t i = 0; i < width; i += W) squares += load(x + i) * load(x + i);
    const float factor = 1 / std::sqrt(sum(squares) / width + eps);
    inverse[row] = factor;
    for (int64_t i = 0; i < width; i += W) store(y + i, load(x + i) * factor * load(gain + i));
  }
}

// Adds the gradients by x and gain from that by y.
void norm_backward(int64_t rows, int64_t width, const float* x, const float* gain, const float* inverse,
                   const float* dy, float* dx, float* dgain) {
  for (int64_t row = 0; row < rows; row++, x += width, dy += width, dx += width) {
    Vec along{};
    for (int64_t i = 0; i < width; i += W) along += load(dy + i) * load(gain + i) * load(x + i);
    const float factor = inverse[row], back = sum(along) * factor * factor * factor / width;
    for (int64_t i = 0; i < width; i += W) {
      store(dgain + i, load(dgain + i) + load(dy + i) * load(x + i) * factor);
      store(dx + i, load(dx + i) + load(dy + i) * load(gain + i) * factor - load(x + i) * back);
    }
  }
}

INLINE Vec sigmoid(Vec x) {
  Vec exponent = x * -LOG2E;
  return 1 / (1 + exp2(select(exponent > 126.f, fill(126), exponent)));
}

// What all threads share: the weights in the layouts of the products, and the strips.
class Model {
 public:
  Model(const Decoder& given, Scratch& memory) : given(given), group(given.heads / given.kv_heads) {
    q_width = given.heads * given.head_dim, kv_width = given.kv_heads * given.head_dim;
    qkv_width = round_up(q_width + 2 * kv_width, W), logits_width = round_up(given.vocabulary, W);
    size_t size = 0;
    for (int pass = 0; pass < 2; pass++) {
      Arena arena{pass ? memory.reserve(size) : nullptr};
      for (int64_t layer = 0; layer < given.layers; layer++) prepare_layer(layer, arena);
      head_t = transposed({{weight(given.layers, 1), given.vocabulary}}, given.d_model, logits_width, arena);
      size = arena.used;
    }
  }

  const Decoder& given;
  int64_t group, q_width, kv_width, qkv_width, logits_width;
  struct LayerWeights {
    const float *qkv_t, *out_t, *gate_up_t, *down_t, *strips;
  };
  std::vector<LayerWeights> layers{size_t(given.layers)};
  const float* head_t;

  const float* weight(int64_t layer, int which) const { return given.weights[layer * WEIGHTS + which]; }
  int64_t strip_floats() const { return strip_size(given.length); }
  int64_t zero() const { return given.length - 1; }

  Head head(int64_t layer, int64_t h, const float* qkv) const {
    const LayerSettings& s = given.settings[layer];
    const float *q = qkv + h * given.head_dim, *k = qkv + q_width + h / group * given.head_dim;
    return {{q, qkv_width}, {k, qkv_width}, {k + kv_width, qkv_width}, given.length, given.length, given.head_dim,
            1 / std::sqrt(float(given.head_dim)), layers[layer].strips + h * strip_floats() + zero(), nullptr, nullptr,
            s.window ? s.window : given.length + 1, weight(layer, TAU) + h * s.tau_columns, s.tau_columns,
            s.context_length, s.threshold, s.renormalise};
  }

 private:
  // The matrices [out, in] one below the other, transposed: [in, columns], 0 beyond them.
  const float* transposed(const std::vector<std::pair<const float*, int64_t>>& matrices, int64_t in, int64_t columns,
                          Arena& arena) {
    float* to = arena.take(in * columns);
    if (!to) return to;
    std::fill_n(to, in * columns, 0.f);
    int64_t column = 0;
    for (const auto& [matrix, outs] : matrices) {
      for (int64_t block = 0; block < outs; block += W)
        for (int64_t i = 0; i < in; i++)
          for (int64_t out = block; out < std::min<int64_t>(block + W, outs); out++)
            to[i * columns + column + out] = matrix[out * in + i];
      column += outs;
    }
    return to;
  }
  void prepare_layer(int64_t layer, Arena& arena) {
    const int64_t d = given.d_model, ff = given.d_ff;
    const auto w = [&](int which) { return weight(layer, which); };
    LayerWeights& to = layers[layer];
    to.qkv_t = transposed({{w(QUERY), q_width}, {w(KEY), kv_width}, {w(VALUE), kv_width}}, d, qkv_width, arena);
    to.out_t = transposed({{w(OUT), d}}, q_width, d, arena);
    to.gate_up_t = transposed({{w(GATE), ff}, {w(UP), ff}}, d, 2 * ff, arena);
    to.down_t = transposed({{w(DOWN), d}}, ff, d, arena);
    float* strips = arena.take(given.heads * strip_floats());
    to.strips = strips;
    const LayerSettings& s = given.settings[layer];
    for (int64_t h = 0; strips && h < given.heads; h++)
      fill_strip(given.length, s.window ? s.window : given.length + 1, w(BIAS) ? w(BIAS) + h * s.reach : nullptr,
                 s.reach, w(SLOPES) ? w(SLOPES) + h : nullptr, strips + h * strip_floats() + zero());
  }
};

// Activations of one layer for a group of sequences, [tokens, ...].
struct Activations {
  float *x, *normed, *inverse, *qkv, *sums, *attended, *middle, *mlp_normed, *mlp_inverse, *gate_up, *product;
};

// One thread's work: its gradients, and the memory of a group of sequences.
class Worker {
 public:
  Worker(const Model& model, int64_t sequences, bool training, Arena& arena)
      : model(model), given(model.given), most(sequences * given.length), training(training),
        layers(training ? given.layers : 1) {
    const int64_t d = given.d_model, ff = given.d_ff;
    if (training) take_gradients(arena);
    for (Activations& to : layers) {
      to = {arena.take(most * d), arena.take(most * d), arena.take(most), arena.take(most * model.qkv_width),
            arena.take(training ? 3 * most * given.heads : 0), arena.take(most * model.q_width), arena.take(most * d),
            arena.take(most * d), arena.take(most), arena.take(most * 2 * ff), arena.take(most * ff)};
    }
    last = arena.take(most * d);
    Head sized{};
    sized.rows = sized.keys = given.length, sized.window = given.length + 1, sized.width = given.head_dim;
    const size_t backward = backward_size(sized) + 2 * given.length * pad_width(given.head_dim);
    attention_memory = arena.take(training ? std::max(forward_size(sized), backward) : forward_size(sized));
    if (!training) return;
    hidden = arena.take(most * d), inverse = arena.take(most);
    logits = arena.take(HEAD_TOKENS * model.logits_width);
    d_hidden = arena.take(most * d), dx = arena.take(most * d), d_attended = arena.take(most * model.q_width);
    d_qkv = arena.take(most * model.qkv_width), d_product = arena.take(most * ff), d_gate_up = arena.take(most * 2 * ff);
    survivors = arena.take(given.length);
  }

  // The worker's share of the gradients, 0 at first.
  void take_gradients(Arena& arena) {
    float* start = arena.next;
    const size_t before = arena.used;
    for (int64_t layer = 0; layer < given.layers; layer++) {
      for (int which = 0; which < TAU; which++) gradients.push_back(arena.take(size_of(which)));
      strips.push_back(arena.take(given.heads * model.strip_floats()));
      taus.emplace_back(given.heads * given.settings[layer].tau_columns);
    }
    d_norm = arena.take(given.d_model), d_head = arena.take(given.vocabulary * given.d_model);
    if (start) std::fill_n(start, arena.used - before, 0.f);
  }
  size_t size_of(int which) const {
    const int64_t d = given.d_model, ff = given.d_ff;
    switch (which) {
      case QUERY: case OUT: return model.q_width * d;
      case KEY: case VALUE: return model.kv_width * d;
      case GATE: case UP: case DOWN: return ff * d;
      default: return d;
    }
  }
  float* gradient(int64_t layer, int which) { return gradients[layer * TAU + which]; }

  // Passes the sequences through all layers: `last` is the residual stream after the last one.
  void forward(int64_t first, int64_t sequences, float* stats) {
    const int64_t tokens = sequences * given.length, d = given.d_model;
    std::copy_n(given.x + first * given.length * d, tokens * d, layers[0].x);
    for (int64_t layer = 0; layer < given.layers; layer++) {
      Activations& now = layers[training ? layer : 0];
      float* next = layer + 1 == given.layers ? last : training ? layers[layer + 1].x : now.x;
      forward_layer(layer, first, sequences, now, next, stats);
    }
  }

  // The summed loss of the sequences, whose gradients, times `factor`, are added; writes dx for them.
  double step(int64_t first, int64_t sequences, const int64_t* targets, float factor) {
    const int64_t tokens = sequences * given.length, d = given.d_model;
    forward(first, sequences, nullptr);
    norm_forward(tokens, d, last, model.weight(given.layers, 0), given.eps, hidden, inverse);
    double loss = 0;
    for (int64_t token = 0; token < tokens; token += HEAD_TOKENS)
      loss += head_step(token, std::min(HEAD_TOKENS, tokens - token), targets + first * given.length, factor);
    std::fill_n(dx, tokens * d, 0.f);
    norm_backward(tokens, d, last, model.weight(given.layers, 0), inverse, d_hidden, dx, d_norm);
    for (int64_t layer = given.layers - 1; layer >= 0; layer--) backward_layer(layer, sequences);
    return loss;
  }

  const Model& model;
  const Decoder& given;
  const int64_t most;  // tokens
  const bool training;
  std::vector<Activations> layers;
  float *last, *hidden, *inverse, *attention_memory, *logits, *d_hidden, *dx, *d_attended, *d_qkv, *d_product,
      *d_gate_up, *survivors, *d_norm, *d_head;
  std::vector<float*> gradients, strips;
  std::vector<std::vector<double>> taus;

 private:
  RowSums sums_of(const Activations& of, int64_t sequence, int64_t h) const {
    if (!training) return {nullptr, nullptr, nullptr};
    const int64_t size = most * given.heads, place = (sequence * given.heads + h) * given.length;
    return {of.sums + place, of.sums + size + place, of.sums + 2 * size + place};
  }

  void rotate(int64_t sequences, float* qkv, float sign) const {
    if (!given.cosine) return;
    const int64_t half = given.head_dim / 2;
    for (int64_t token = 0; token < sequences * given.length; token++) {
      const float *c = given.cosine + token % given.length * half, *s = given.sine + token % given.length * half;
      for (int64_t h = 0; h < given.heads + given.kv_heads; h++) {
        float *a = qkv + token * model.qkv_width + h * given.head_dim, *b = a + half;
        for (int64_t i = 0; i < half; i++) {
          const float x = a[i], y = b[i];
          a[i] = x * c[i] - sign * y * s[i];
          b[i] = y * c[i] + sign * x * s[i];
        }
      }
    }
  }

  void forward_layer(int64_t layer, int64_t first, int64_t sequences, Activations& now, float* next, float* stats) {
    const int64_t tokens = sequences * given.length, d = given.d_model, ff = given.d_ff, width = model.q_width;
    const Model::LayerWeights& weights = model.layers[layer];
    norm_forward(tokens, d, now.x, model.weight(layer, ATTENTION_NORM), given.eps, now.normed, now.inverse);
    multiply(tokens, model.qkv_width, d, {now.normed, d, 1}, weights.qkv_t, model.qkv_width, now.qkv, model.qkv_width,
             false);
    rotate(sequences, now.qkv, 1);
    const int64_t size = given.batch * given.heads * given.length;
    for (int64_t sequence = 0; sequence < sequences; sequence++)
      for (int64_t h = 0; h < given.heads; h++) {
        const int64_t token = sequence * given.length;
        float* found = stats + 4 * layer * size + ((first + sequence) * given.heads + h) * given.length;
        const RowStats row_stats{found, found + size, found + 2 * size, found + 3 * size};
        attend_forward(model.head(layer, h, now.qkv + token * model.qkv_width), 0, given.length,
                       {now.attended + token * width + h * given.head_dim, width}, sums_of(now, sequence, h),
                       stats ? &row_stats : nullptr, attention_memory);
      }
    std::copy_n(now.x, tokens * d, now.middle);
    multiply(tokens, d, width, {now.attended, width, 1}, weights.out_t, d, now.middle, d, true);
    norm_forward(tokens, d, now.middle, model.weight(layer, MLP_NORM), given.eps, now.mlp_normed, now.mlp_inverse);
    multiply(tokens, 2 * ff, d, {now.mlp_normed, d, 1}, weights.gate_up_t, 2 * ff, now.gate_up, 2 * ff, false);
    for (int64_t token = 0; token < tokens; token++) {
      const float *gate = now.gate_up + token * 2 * ff, *up = gate + ff;
      float* product = now.product + token * ff;
      for (int64_t i = 0; i < ff; i += W) {
        Vec g = load(gate + i);
        store(product + i, g * sigmoid(g) * load(up + i));
      }
    }
    std::copy_n(now.middle, tokens * d, next);
    multiply(tokens, d, ff, {now.product, ff, 1}, weights.down_t, d, next, d, true);
  }

  // Loss of some tokens and its gradients by the head and by their hidden states.
  double head_step(int64_t token, int64_t tokens, const int64_t* targets, float factor) {
    const int64_t d = given.d_model, width = model.logits_width, words = given.vocabulary;
    const float* x = hidden + token * d;
    multiply(tokens, width, d, {x, d, 1}, model.head_t, width, logits, width, false);
    double loss = 0;
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t target = targets[token + t];
      float* z = logits + t * width;
      if (target < 0) {
        std::fill_n(z, width, 0.f);
        continue;
      }
      for (int64_t i = words; i < width; i++) z[i] = -INF;
      Vec top = fill(LOWEST), total{};
      for (int64_t i = 0; i < width; i += W) top = larger(load(z + i), top);
      const float highest = largest(top), wanted = z[target];
      for (int64_t i = 0; i < width; i += W) {
        Vec e = exp2((load(z + i) - highest) * LOG2E);
        store(z + i, e);
        total += e;
      }
      const float all = sum(total);
      loss += std::log(all) + highest - wanted;
      for (int64_t i = 0; i < width; i += W) store(z + i, load(z + i) * (factor / all));
      z[target] -= factor;
    }
    add_transposed(words, d, tokens, logits, width, x, d, d_head, d, width);
    multiply(tokens, d, words, {logits, width, 1}, model.weight(given.layers, 1), d, d_hidden + token * d, d, false);
    return loss;
  }

  // From the gradient by a layer's output to that by its input, both in dx.
  void backward_layer(int64_t layer, int64_t sequences) {
    const int64_t tokens = sequences * given.length, d = given.d_model, ff = given.d_ff, width = model.q_width;
    Activations& now = layers[layer];
    const auto weight = [&](int which) { return model.weight(layer, which); };
    const auto add = [&](int which, int64_t outs, int64_t ins, const float* dy, int64_t step, const float* x) {
      add_transposed(outs, ins, tokens, dy, step, x, ins, gradient(layer, which), ins, outs);
    };
    add(DOWN, d, ff, dx, d, now.product);
    multiply(tokens, ff, d, {dx, d, 1}, weight(DOWN), ff, d_product, ff, false);
    for (int64_t token = 0; token < tokens; token++) {
      const float *gate = now.gate_up + token * 2 * ff, *up = gate + ff, *dy = d_product + token * ff;
      float *d_gate = d_gate_up + token * 2 * ff, *d_up = d_gate + ff;
      for (int64_t i = 0; i < ff; i += W) {
        Vec g = load(gate + i), s = sigmoid(g), d = load(dy + i);
        store(d_up + i, d * g * s);
        store(d_gate + i, d * load(up + i) * s * (1 + g * (1 - s)));
      }
    }
    add(GATE, ff, d, d_gate_up, 2 * ff, now.mlp_normed);
    add(UP, ff, d, d_gate_up + ff, 2 * ff, now.mlp_normed);
    multiply(tokens, d, ff, {d_gate_up, 2 * ff, 1}, weight(GATE), d, d_hidden, d, false);
    multiply(tokens, d, ff, {d_gate_up + ff, 2 * ff, 1}, weight(UP), d, d_hidden, d, true);
    norm_backward(tokens, d, now.middle, weight(MLP_NORM), now.mlp_inverse, d_hidden, dx, gradient(layer, MLP_NORM));
    add(OUT, d, width, dx, d, now.attended);
    multiply(tokens, width, d, {dx, d, 1}, weight(OUT), width, d_attended, width, false);
    for (int64_t sequence = 0; sequence < sequences; sequence++)
      for (int64_t kv = 0; kv < given.kv_heads; kv++) backward_heads(layer, sequence, kv);
    rotate(sequences, d_qkv, -1);
    const int64_t step = model.qkv_width, kv_width = model.kv_width;
    const float *d_k = d_qkv + width, *d_v = d_k + kv_width;
    add(QUERY, width, d, d_qkv, step, now.normed);
    add(KEY, kv_width, d, d_k, step, now.normed);
    add(VALUE, kv_width, d, d_v, step, now.normed);
    multiply(tokens, d, width, {d_qkv, step, 1}, weight(QUERY), d, d_hidden, d, false);
    multiply(tokens, d, kv_width, {d_k, step, 1}, weight(KEY), d, d_hidden, d, true);
    multiply(tokens, d, kv_width, {d_v, step, 1}, weight(VALUE), d, d_hidden, d, true);
    norm_backward(tokens, d, now.x, weight(ATTENTION_NORM), now.inverse, d_hidden, dx, gradient(layer, ATTENTION_NORM));
  }

  // Gradients through the attention of the query heads of one kv head in one sequence.
  void backward_heads(int64_t layer, int64_t sequence, int64_t kv) {
    const int64_t token = sequence * given.length, width = given.head_dim, padded = pad_width(width);
    const Activations& now = layers[layer];
    const float* qkv = now.qkv + token * model.qkv_width;
    float* d_rows = d_qkv + token * model.qkv_width;
    const Head first = model.head(layer, kv * model.group, qkv);
    float *dk = attention_memory + backward_size(first), *dv = dk + given.length * padded;
    std::fill_n(dk, 2 * given.length * padded, 0.f);
    const PackedKeys packed = pack_keys(first, true, attention_memory);
    const bool with_strips = model.weight(layer, BIAS) || model.weight(layer, SLOPES);
    for (int64_t h = kv * model.group; h < (kv + 1) * model.group; h++) {
      const Head head = model.head(layer, h, qkv);
      const HeadGradients to{{d_rows + h * width, model.qkv_width}, dk, dv,
                             with_strips ? strips[layer] + h * model.strip_floats() + model.zero() : nullptr, survivors};
      attend_backward(head, packed, 0, given.length, {d_attended + token * model.q_width + h * width, model.q_width},
                      nullptr, sums_of(now, sequence, h), to, attention_memory + packed_size(first, true));
      double* tau = taus[layer].data() + h * head.tau_columns;
      for (int64_t row = 0; row < given.length; row++) tau[head.tau_entry(row)] -= survivors[row];
    }
    for (int64_t key = 0; key < given.length; key++) {
      float *k = d_rows + key * model.qkv_width + model.q_width + kv * width, *v = k + model.kv_width;
      for (int64_t i = 0; i < width; i++) k[i] = dk[key * padded + i] * first.scale, v[i] = dv[key * padded + i];
    }
  }
};

// Memory that the calling thread keeps between calls: of the model, and of each worker.
struct Kept {
  Scratch model;
  std::vector<Scratch> workers;
};
thread_local Kept kept;

// Calls work(worker, first, sequences) for each group of sequences. Each thread has a worker, and always the same groups.
template <class Work>
std::vector<std::unique_ptr<Worker>> pass_groups(const Model& model, bool training, const Work& work) {
  const Decoder& decoder = model.given;
  const int64_t group = std::clamp<int64_t>(GROUP_TOKENS / decoder.length, 1, decoder.batch);
  const int64_t groups = (decoder.batch + group - 1) / group, threads = std::min(decoder.threads, groups);
  std::vector<std::unique_ptr<Worker>> workers(threads);
  kept.workers.resize(std::max<size_t>(kept.workers.size(), threads));
  auto& memory = kept.workers;
  run_tasks(threads, threads, [&](int64_t task, Scratch&) {
    Arena counted{nullptr};
    Worker sized(model, group, training, counted);
    Arena arena{memory[task].reserve(counted.used)};
    workers[task] = std::make_unique<Worker>(model, group, training, arena);
    for (int64_t index = task * groups / threads; index < (task + 1) * groups / threads; index++)
      work(*workers[task], index * group, std::min(group, decoder.batch - index * group));
  });
  return workers;
}

void shrink_kept() {
  kept.model.shrink();
  for (Scratch& memory : kept.workers) memory.shrink();
}

// Sum over the workers, in their order.
template <class Pick>
void reduce(const std::vector<std::unique_ptr<Worker>>& workers, size_t size, const Pick& pick, float* to) {
  if (!to) return;
  std::copy_n(pick(*workers[0]), size, to);
  for (size_t i = 1; i < workers.size(); i++) {
    const float* from = pick(*workers[i]);
    for (size_t n = 0; n < size; n++) to[n] += from[n];
  }
}

// Gradients of tau, bias and slopes of one layer.
void reduce_head_parameters(const std::vector<std::unique_ptr<Worker>>& workers, const Model& model, int64_t layer,
                            float* dtau, float* dbias, float* dslopes) {
  const LayerSettings& settings = model.given.settings[layer];
  for (int64_t i = 0; dtau && i < model.given.heads * settings.tau_columns; i++) {
    double total = 0;
    for (const auto& worker : workers) total += worker->taus[layer][i];
    dtau[i] = float(total);
  }
  for (int64_t h = 0; h < model.given.heads; h++) {
    double slope = 0;
    for (int64_t d = 0; d < std::max(model.given.length, settings.reach); d++) {
      double value = 0;
      for (const auto& worker : workers)
        if (d < model.given.length) value += worker->strips[layer][h * model.strip_floats() + model.zero() - d];
      slope -= d * value;
      if (dbias && d < settings.reach) dbias[h * settings.reach + d] = float(value);
    }
    if (dslopes) dslopes[h] = float(slope);
  }
}

}  // namespace

void flash_lazy_decoder_forward(const Decoder* decoder, float* residual, float* stats) {
  const Model model(*decoder, kept.model);
  const int64_t size = decoder->length * decoder->d_model;
  pass_groups(model, false, [&](Worker& worker, int64_t first, int64_t sequences) {
    worker.forward(first, sequences, stats);
    std::copy_n(worker.last, sequences * size, residual + first * size);
  });
  shrink_kept();
}

double flash_lazy_decoder_step(const Decoder* decoder, const int64_t* targets, float* dx, float* const* gradients) {
  const Model model(*decoder, kept.model);
  const int64_t tokens = decoder->batch * decoder->length, size = decoder->length * decoder->d_model;
  const int64_t counted = std::count_if(targets, targets + tokens, [](int64_t target) { return target >= 0; });
  std::vector<double> losses(decoder->batch);
  const auto workers = pass_groups(model, true, [&](Worker& worker, int64_t first, int64_t sequences) {
    losses[first] = worker.step(first, sequences, targets, float(1.0 / counted));
    std::copy_n(worker.dx, sequences * size, dx + first * size);
  });
  for (int64_t layer = 0; layer < decoder->layers; layer++) {
    float* const* to = gradients + layer * WEIGHTS;
    for (int which = 0; which < TAU; which++)
      reduce(workers, workers[0]->size_of(which), [&](Worker& w) { return w.gradient(layer, which); }, to[which]);
    reduce_head_parameters(workers, model, layer, to[TAU], to[BIAS], to[SLOPES]);
  }
  reduce(workers, decoder->d_model, [](Worker& w) { return w.d_norm; }, gradients[decoder->layers * WEIGHTS]);
  reduce(workers, decoder->vocabulary * decoder->d_model, [](Worker& w) { return w.d_head; },
         gradients[decoder->layers * WEIGHTS + 1]);
  double loss = 0;
  for (double each : losses) loss += each;
  shrink_kept();
  return loss / counted;
}
