// One step of decoding rows through a whole decoder in one call: what the layers in Python do with
// some fifteen operations each, every one of which costs more to call than to compute where a model
// is small. It runs the kernels of cpu.cpp, linear.cpp and collectives.cpp in the layers' order, and
// rounds where they do, so its results are theirs bit for bit.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "floats.h"
#include "grouped.h"
#include "vectors.h"

struct Comm;
extern "C" int collective(Comm* c, int op, int dtype, int64_t numel, int64_t size, int64_t row,
                          const void* in, void* out);

// The kernels of one dtype, under names without it.
#define KERNELS(NAME, T)                                                                          \
  extern "C" {                                                                                    \
  void rms_norm_##NAME(const T*, int64_t, int64_t, T*, int64_t, const T*, T*, int64_t, int64_t,   \
                       float, int);                                                               \
  void silu_and_mul_##NAME(const T*, int64_t, T*, int64_t, int64_t, int);                         \
  void gelu_tanh_and_mul_##NAME(const T*, int64_t, T*, int64_t, int64_t, int);                    \
  void rotate_##NAME(T*, int64_t, int64_t, T*, int64_t, int64_t, int64_t, const T*, const T*,     \
                     int64_t, int64_t, int);                                                      \
  void decode_attention_##NAME(const T*, int64_t, const int64_t*, const T*, const T*,             \
                               const int64_t*, int64_t, const int64_t*, int64_t, int64_t,         \
                               int64_t, int64_t, int64_t, int64_t, float, float, T*, int64_t,     \
                               int);                                                              \
  void linear_##NAME(const T*, int64_t, int64_t, const T*, const T*, int64_t, int64_t, T*,        \
                     int64_t, const Factors*, const GroupedRows*, int);                           \
  }                                                                                               \
  template <>                                                                                     \
  struct Kernels<T> {                                                                             \
    static constexpr auto rms_norm = rms_norm_##NAME;                                             \
    static constexpr auto silu_and_mul = silu_and_mul_##NAME;                                     \
    static constexpr auto gelu_tanh_and_mul = gelu_tanh_and_mul_##NAME;                           \
    static constexpr auto rotate = rotate_##NAME;                                                 \
    static constexpr auto decode_attention = decode_attention_##NAME;                             \
    static constexpr auto linear = linear_##NAME;                                                 \
  };

template <typename T>
struct Kernels;
KERNELS(f32, float)
KERNELS(bf16, bf16)

// The structs have the fields of their namesakes in decode.py.

template <typename T>
struct Linear {
  const T* weight;  // as `linear` reads it
  const T* bias;    // or null
  int64_t in, out;
  Factors factors;  // its adapters in their slots; `a` is null where there are none
};

template <typename T>
struct Layer {
  const T *input_norm, *post_norm;
  const T *q_norm, *k_norm;  // a head, or null
  const T* angles;           // [positions, 2, dim]: cos, then sin with its first half negated
  T *keys, *values;          // [pages, page_size, kv_heads, dim]
  int64_t window;            // 0: none
  Linear<T> qkv, o, gate_up, down;
};

template <typename T>
struct Decoder {
  const Layer<T>* layers;
  int64_t num_layers, hidden, heads, kv_heads, dim, inner, page_size;
  float eps, scale, softcap;
  int32_t gelu, threads, dtype;  // dtype: as `collective` numbers it
  const T* embedding;            // [vocab_rows, hidden], from id `vocab_first` on
  int64_t vocab_first, vocab_rows;
  const T* norm;
  Linear<T> head;
  Comm* comm;  // null: one rank
  T *residual, *x, *wide, *mixed, *local;  // scratch for as many rows as a step may have
};

struct DecodeStep {
  int64_t rows;
  const int64_t *ids, *positions, *places, *pages, *lengths;  // pages [rows, width]
  int64_t width;
  const GroupedRows* adapters;  // null: no adapter row
  void* logits;  // [rows, world * head.out] on rank 0
};

namespace {

constexpr int SUM = 0, GATHER = 4;  // as collectives.py numbers them

template <typename T>
struct Run {
  using K = Kernels<T>;
  const Decoder<T>& d;
  const DecodeStep& s;

  // Threads for so many elements: waking one costs about as much as reading 16384.
  int threads(int64_t elements) const { return elements >= 16384 ? d.threads : 1; }

  void linear(const Linear<T>& l, const T* x, T* y) const {
    K::linear(x, l.in, s.rows, l.weight, l.bias, l.in, l.out, y, l.out,
              l.factors.a ? &l.factors : nullptr, s.adapters, threads(4 * l.in * l.out));
  }

  void norm(T* residual, const T* weight) const {
    K::rms_norm(d.x, d.hidden, 1, residual, d.hidden, weight, d.x, s.rows, d.hidden, d.eps,
                threads(s.rows * d.hidden));
  }

  int all_reduce() const {
    if (!d.comm) return 0;
    return collective(d.comm, SUM, d.dtype, s.rows * d.hidden, sizeof(T), 0, d.x, d.x);
  }

  void embed() const {
    for (int64_t r = 0; r < s.rows; ++r) {
      const int64_t id = s.ids[r] - d.vocab_first;
      T* to = d.x + r * d.hidden;
      if (id >= 0 && id < d.vocab_rows)
        std::memcpy(to, d.embedding + id * d.hidden, d.hidden * sizeof(T));
      else
        std::memset(to, 0, d.hidden * sizeof(T));
    }
  }

  // Queries in `wide` over what the cache holds and their own keys, which join it; into `mixed`.
  void attend(const Layer<T>& l) const {
    const int64_t width = l.qkv.out, q_size = d.heads * d.dim, kv_size = d.kv_heads * d.dim;
    for (int64_t r = 0; r < s.rows; ++r) {
      T *q = d.wide + r * width, *k = q + q_size;
      if (l.q_norm) {
        K::rms_norm(q, width, d.heads, nullptr, 0, l.q_norm, q, d.heads, d.dim, d.eps, 1);
        K::rms_norm(k, width, d.kv_heads, nullptr, 0, l.k_norm, k, d.kv_heads, d.dim, d.eps, 1);
      }
      const T* angles = l.angles + s.positions[r] * 2 * d.dim;
      K::rotate(q, width, d.heads, k, width, d.kv_heads, d.dim, angles, angles + d.dim, 2 * d.dim,
                1, 1);
      const int64_t at = s.lengths[r] - 1, page = s.pages[r * s.width + at / d.page_size];
      const int64_t place = (page * d.page_size + at % d.page_size) * kv_size;
      std::memcpy(l.keys + place, k, kv_size * sizeof(T));
      std::memcpy(l.values + place, k + kv_size, kv_size * sizeof(T));
    }
    // As much work as the longest row's, for each.
    int64_t longest = 0;
    for (int64_t r = 0; r < s.rows; ++r) longest = s.lengths[r] > longest ? s.lengths[r] : longest;
    K::decode_attention(d.wide, width, s.places, l.keys, l.values, s.pages, s.width, s.lengths,
                        s.rows, d.heads, d.kv_heads, d.dim, d.page_size, l.window, d.scale,
                        d.softcap, d.mixed, q_size, threads(s.rows * longest * q_size / 2));
  }

  int layer(const Layer<T>& l, bool first) const {
    if (first) std::memcpy(d.residual, d.x, s.rows * d.hidden * sizeof(T));
    norm(first ? nullptr : d.residual, l.input_norm);
    linear(l.qkv, d.x, d.wide);
    attend(l);
    linear(l.o, d.mixed, d.x);
    if (const int lost = all_reduce()) return lost;
    norm(d.residual, l.post_norm);
    linear(l.gate_up, d.x, d.wide);
    (d.gelu ? K::gelu_tanh_and_mul : K::silu_and_mul)(d.wide, 2 * d.inner, d.mixed, s.rows, d.inner,
                                                      threads(4 * s.rows * d.inner));
    linear(l.down, d.mixed, d.x);
    return all_reduce();
  }

  int all() const {
    embed();
    if (const int lost = all_reduce()) return lost;
    for (int64_t i = 0; i < d.num_layers; ++i)
      if (const int lost = layer(d.layers[i], i == 0)) return lost;
    norm(d.residual, d.norm);
    T* logits = static_cast<T*>(s.logits);
    linear(d.head, d.x, d.comm ? d.local : logits);
    if (!d.comm) return 0;
    return collective(d.comm, GATHER, d.dtype, s.rows * d.head.out, sizeof(T),
                      d.head.out * sizeof(T), d.local, logits);
  }
};

}  // namespace

// Logits of a step of rows with one new token each; keys and values join the cache. Collective
// where there are several ranks: what `collective` answered, 0 when all went well.
extern "C" int decode_step_f32(const Decoder<float>* d, const DecodeStep* s) {
  return Run<float>{*d, *s}.all();
}
extern "C" int decode_step_bf16(const Decoder<bf16>* d, const DecodeStep* s) {
  return Run<bf16>{*d, *s}.all();
}

// Of each row of x [rows, n], the first place of its largest value, and whether that is a finite
// number: not where any value is NaN.
extern "C" void best_of_rows(const float* x, int64_t stride, int64_t rows, int64_t n, int64_t* best,
                             uint8_t* finite) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = x + r * stride;
    vf tops = vf{} - INFINITY;
    vi odd{};
    int64_t i = 0;
    for (; i + W <= n; i += W) {
      const vf v = load(row + i);
      odd |= v != v;
      tops = v > tops ? v : tops;
    }
    float top = -INFINITY;
    bool strange = false;
    for (int w = 0; w < W; ++w) {
      top = tops[w] > top ? tops[w] : top;
      strange |= odd[w] != 0;
    }
    for (; i < n; ++i) {
      top = row[i] > top ? row[i] : top;
      strange |= row[i] != row[i];
    }
    int64_t at = 0;
    while (at + 1 < n && row[at] != top) ++at;
    best[r] = at;
    finite[r] = !strange && std::isfinite(top);
  }
}
