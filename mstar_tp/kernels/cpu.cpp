// CPU kernels of one decode step, for float32 and bfloat16: what torch does in several calls, or by
// copying first, in one pass over memory. Sums are float32. A value's sum is taken by one thread in
// one order, so a row's result depends neither on the other rows nor on the number of threads.
//
// cpu.py compiles this file on the machine it runs on and calls it through ctypes. Pointers are
// those of torch tensors; strides and sizes count elements. The threads are those of torch's own
// OpenMP runtime: two pools would fight for the cores.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "floats.h"
#include "vectors.h"

namespace {

template <typename T>
inline float rounded(float x) {
  T t;
  narrow(x, &t);
  return widen(t);
}

template <typename T>
inline vf round_to(vf v) {
  T t[W];
  store(t, v);
  return load(t);
}
template <>
inline vf round_to<float>(vf v) {
  return v;
}

inline vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

// e^x to about one unit in the last place: 2^n * p(r), r in [-ln 2 / 2, ln 2 / 2].
#ifdef __AVX512F__
inline vf exp_(vf x) {
  // NaN passes both: they answer with the second when either is.
  const __m512 low = _mm512_max_ps(_mm512_set1_ps(-104.f), (__m512)x);
  const vf within = (vf)_mm512_min_ps(_mm512_set1_ps(89.f), low);
  const vf n = (vf)_mm512_roundscale_ps((__m512)(within * 1.44269504f), 0);
  const vf r = (within - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = vf{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
}
#else
inline vf exp_(vf x) {
  const vi is_nan = x != x;
  const vf clamped = select(x > 88.7f, vf{} + 88.7f, select(x < -87.3f, vf{} - 87.3f, x));
  const vf magic = vf{} + 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const vf n = (clamped * 1.44269504f + magic) - magic;
  const vf r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = vf{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
  vf y = p * (vf)exponent;
  y = select(x < -103.f, vf{}, y);
  y = select(x > 88.7f, vf{} + INFINITY, y);
  return select(is_nan, x, y);
}
#endif

inline vf tanh_(vf x) {
  const vf magnitude = select(x < 0.f, -x, x);
  const vf e = exp_(-2.f * magnitude);
  const vf y = (1.f - e) / (1.f + e);
  return select(x < 0.f, -y, y);
}

inline vf silu(vf x) { return x / (1.f + exp_(-x)); }
inline vf gelu_tanh(vf x) {  // (1 + tanh z) / 2 = 1 / (1 + e^-2z), without its cancellation
  return x / (1.f + exp_(-1.5957691216f * (x + 0.044715f * x * x * x)));
}

// ---------------------------------------------------------------------------------------- norm

// residual += x (when there is one), then out = norm(residual) * weight. Rows come in bunches of
// `bunch` that lie side by side (a token's heads), `x_stride` from bunch to bunch. `late`: round the
// norm to T and multiply by the weight in T, as Llama does; else multiply in float32, as Gemma does.
template <typename T, typename S>
void rms_norm(const T* x, int64_t x_stride, int64_t bunch, T* residual, int64_t residual_stride,
              const S* weight, T* out, int64_t rows, int64_t dim, float eps, int late,
              int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x + row / bunch * x_stride + row % bunch * dim;
    if (residual) {
      T* to = residual + row * residual_stride;
      int64_t i = 0;
      for (; i + W <= dim; i += W) store(to + i, load(in + i) + load(to + i));
      for (; i < dim; ++i) narrow(widen(in[i]) + widen(to[i]), to + i);
      in = to;
    }
    vf squares{}, more{};
    int64_t i = 0;
    for (; i + 2 * W <= dim; i += 2 * W) {
      const vf a = load(in + i), b = load(in + i + W);
      squares += a * a;
      more += b * b;
    }
    for (; i + W <= dim; i += W) squares += load(in + i) * load(in + i);
    float total = sum(squares + more);
    for (; i < dim; ++i) total += widen(in[i]) * widen(in[i]);
    const float scale = 1.f / std::sqrt(total / float(dim) + eps);
    T* to = out + row * dim;
    for (i = 0; i + W <= dim; i += W) {
      const vf normed = load(in + i) * scale;
      store(to + i, (late ? round_to<T>(normed) : normed) * load(weight + i));
    }
    for (; i < dim; ++i) {
      const float normed = widen(in[i]) * scale;
      narrow((late ? rounded<T>(normed) : normed) * widen(weight[i]), to + i);
    }
  }
}

// ---------------------------------------------------------------------------- gated activation

// out = act(gate) * up, the activation rounded to T before the product.
template <typename T, vf (*act)(vf)>
void gated(const T* gate_up, int64_t stride, T* out, int64_t rows, int64_t inner, int threads) {
  constexpr int64_t block = 512;
  const int64_t blocks = (inner + block - 1) / block;
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t b = 0; b < blocks; ++b) {
      const T* gate = gate_up + row * stride;
      const T* up = gate + inner;
      T* to = out + row * inner;
      const int64_t stop = inner < (b + 1) * block ? inner : (b + 1) * block;
      int64_t i = b * block;
      for (; i + W <= stop; i += W)
        store(to + i, round_to<T>(act(load(gate + i))) * load(up + i));
      if (i < stop) {
        T g[W] = {}, u[W] = {};
        std::memcpy(g, gate + i, (stop - i) * sizeof(T));
        std::memcpy(u, up + i, (stop - i) * sizeof(T));
        T o[W];
        store(o, round_to<T>(act(load(g))) * load(u));
        std::memcpy(to + i, o, (stop - i) * sizeof(T));
      }
    }
}

// -------------------------------------------------------------------------------- rotary, cache

// Interleaving `heads` heads of x in place. cos and sin [dim], the first half of sin negated.
template <typename T>
inline void turn(T* x, int64_t heads, int64_t dim, const T* cos, const T* sin) {
  const int64_t half = dim / 2;
  for (int64_t h = 0; h < heads; ++h, x += dim) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
      const vf a = load(x + i), b = load(x + i + half);
      store(x + i, a * load(cos + i) + b * load(sin + i));
      store(x + i + half, b * load(cos + i + half) + a * load(sin + i + half));
    }
    for (; i < half; ++i) {
      const float a = widen(x[i]), b = widen(x[i + half]);
      narrow(a * widen(cos[i]) + b * widen(sin[i]), x + i);
      narrow(b * widen(cos[i + half]) + a * widen(sin[i + half]), x + i + half);
    }
  }
}

template <typename T>
void rotate(T* q, int64_t q_stride, int64_t q_heads, T* k, int64_t k_stride, int64_t k_heads,
            int64_t dim, const T* cos, const T* sin, int64_t table_stride, int64_t tokens,
            int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    turn(q + t * q_stride, q_heads, dim, cos + t * table_stride, sin + t * table_stride);
    turn(k + t * k_stride, k_heads, dim, cos + t * table_stride, sin + t * table_stride);
  }
}

// ----------------------------------------------------------------------------------- attention

constexpr int64_t BLOCK = 128;  // keys whose scores are kept at once

// Where a row's tokens lie: their pages, and how far apart tokens are in a page.
struct Pages {
  const int64_t* pages;
  int64_t page_size;
  int64_t stride;

  int64_t offset(int64_t token) const {
    return (pages[token / page_size] * page_size + token % page_size) * stride;
  }
};

template <typename T>
inline void prefetch(const T* p, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(p + i);
}

// scores[n][j] = queries[n] . key j, for N queries.
template <int N, typename T>
inline void score(const float* queries, const T* key, int64_t dim, float* scores) {
  vf sums[N] = {};
  int64_t i = 0;
  for (; i + W <= dim; i += W) {
    const vf k = load(key + i);
    for (int n = 0; n < N; ++n) sums[n] += k * load(queries + n * dim + i);
  }
  for (int n = 0; n < N; ++n) {
    float total = sum(sums[n]);
    for (int64_t d = i; d < dim; ++d) total += widen(key[d]) * queries[n * dim + d];
    scores[n * BLOCK] = total;
  }
}

// The same of four keys at once, for whole vectors of dim.
template <int N, typename T>
inline void score_four(const float* queries, const T* keys, const int64_t* offsets, int64_t dim,
                       float* scores) {
  vf all[W] = {};
  for (int64_t i = 0; i < dim; i += W) {
    vf k[4];
    for (int j = 0; j < 4; ++j) k[j] = load(keys + offsets[j] + i);
    for (int n = 0; n < N; ++n) {
      const vf q = load(queries + n * dim + i);
      for (int j = 0; j < 4; ++j) all[n * 4 + j] += k[j] * q;
    }
  }
  float each[W];
  store(each, sums(all));
  for (int n = 0; n < N; ++n) std::memcpy(scores + n * BLOCK, each + n * 4, 4 * sizeof(float));
}

// A block's scores of N queries.
template <int N, typename T>
inline void score_block(const float* queries, const T* keys, const int64_t* offsets, int64_t count,
                        int64_t dim, float* scores) {
  int64_t j = 0;
  if (dim % W == 0)
    for (; j + 4 <= count; j += 4) score_four<N>(queries, keys, offsets + j, dim, scores + j);
  for (; j < count; ++j) score<N>(queries, keys + offsets[j], dim, scores + j);
}

// acc[n] += sum over the block's keys of weights[n][j] * value j, for N queries and V vectors.
template <int N, int V, typename T>
inline void gather(const float* weights, const T* values, const int64_t* offsets, int64_t count,
                   float* acc, int64_t dim) {
  vf sums[N][V];
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) sums[n][v] = load(acc + n * dim + v * W);
  for (int64_t j = 0; j < count; ++j) {
    const T* value = values + offsets[j];
    vf lanes[V];
    for (int v = 0; v < V; ++v) lanes[v] = load(value + v * W);
    for (int n = 0; n < N; ++n)
      for (int v = 0; v < V; ++v) sums[n][v] += weights[n * BLOCK + j] * lanes[v];
  }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) store(acc + n * dim + v * W, sums[n][v]);
}

template <int N, typename T>
inline void gather_all(const float* weights, const T* values, const int64_t* offsets,
                       int64_t count, float* acc, int64_t dim) {
  int64_t i = 0;
  for (; i + 4 * W <= dim; i += 4 * W)
    gather<N, 4>(weights, values + i, offsets, count, acc + i, dim);
  for (; i + W <= dim; i += W) gather<N, 1>(weights, values + i, offsets, count, acc + i, dim);
  for (; i < dim; ++i)
    for (int n = 0; n < N; ++n)
      for (int64_t j = 0; j < count; ++j)
        acc[n * dim + i] += weights[n * BLOCK + j] * widen(values[offsets[j] + i]);
}

// One query token and one key head: `group` query heads over the row's keys `first` to `length`.
template <typename T>
void attend(const T* q, int64_t group, int64_t dim, const T* keys, const T* values,
            const Pages& pages, int64_t first, int64_t length, float scale, float cap, T* out,
            float* scratch) {
  float* qs = scratch;                  // [group, dim]
  float* acc = qs + group * dim;        // [group, dim]
  float* scores = acc + group * dim;    // [group, BLOCK]
  float* top = scores + group * BLOCK;  // [group]
  float* total = top + group;           // [group]
  int64_t offsets[BLOCK];
  for (int64_t i = 0; i < group * dim; ++i) qs[i] = widen(q[i]) * scale, acc[i] = 0;
  for (int64_t g = 0; g < group; ++g) top[g] = -INFINITY, total[g] = 0;
  for (int64_t start = first; start < length; start += BLOCK) {
    const int64_t count = length - start < BLOCK ? length - start : BLOCK;
    const int64_t padded = (count + W - 1) / W * W;
    for (int64_t j = 0; j < count; ++j) offsets[j] = pages.offset(start + j);
    for (int64_t j = 0; j < count; ++j) prefetch(values + offsets[j], dim);
    for (int64_t g = 0; g < group; g += 4) {
      const float* some = qs + g * dim;
      float* to = scores + g * BLOCK;
      switch (group - g) {
        case 1: score_block<1>(some, keys, offsets, count, dim, to); break;
        case 2: score_block<2>(some, keys, offsets, count, dim, to); break;
        case 3: score_block<3>(some, keys, offsets, count, dim, to); break;
        default: score_block<4>(some, keys, offsets, count, dim, to);
      }
    }
    for (int64_t g = 0; g < group; ++g) {
      float* s = scores + g * BLOCK;
      for (int64_t j = count; j < padded; ++j) s[j] = -INFINITY;
      if (cap > 0)
        for (int64_t j = 0; j < count; j += W)
          store(s + j, select(load(s + j) < -3e38f, load(s + j), cap * tanh_(load(s + j) / cap)));
      float peak = top[g];
      for (int64_t j = 0; j < count; ++j) peak = s[j] > peak || s[j] != s[j] ? s[j] : peak;
      const float shrink = peak == top[g] ? 1.f : std::exp(top[g] - peak);
      vf sums{};
      for (int64_t j = 0; j < padded; j += W) {
        const vf e = exp_(load(s + j) - peak);
        store(s + j, e);
        sums += e;
      }
      total[g] = total[g] * shrink + sum(sums);
      top[g] = peak;
      if (shrink != 1.f)
        for (int64_t i = 0; i < dim; ++i) acc[g * dim + i] *= shrink;
    }
    int64_t g = 0;
    for (; g + 4 <= group; g += 4)
      gather_all<4>(scores + g * BLOCK, values, offsets, count, acc + g * dim, dim);
    for (; g < group; ++g)
      gather_all<1>(scores + g * BLOCK, values, offsets, count, acc + g * dim, dim);
  }
  for (int64_t g = 0; g < group; ++g)
    for (int64_t i = 0; i < dim; ++i) narrow(acc[g * dim + i] / total[g], out + g * dim + i);
}

// Rows of one query each. q [rows] at `tokens`, pages [rows, width]; caches [pages, page, K, dim].
template <typename T>
void decode_attention(const T* q, int64_t q_stride, const int64_t* tokens, const T* k_cache,
                      const T* v_cache, const int64_t* pages, int64_t width,
                      const int64_t* lengths, int64_t rows, int64_t heads, int64_t kv_heads,
                      int64_t dim, int64_t page_size, int64_t window, float scale, float cap,
                      T* out, int64_t out_stride, int threads) {
  const int64_t group = heads / kv_heads;
  const size_t scratch = group * (2 * dim + BLOCK + 2);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> own(scratch);
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t head = 0; head < kv_heads; ++head) {
        const int64_t length = lengths[row];
        const int64_t first = window > 0 && length > window ? length - window : 0;
        const int64_t at = head * group * dim, token = tokens[row];
        attend(q + token * q_stride + at, group, dim, k_cache + head * dim, v_cache + head * dim,
               Pages{pages + row * width, page_size, kv_heads * dim}, first, length, scale, cap,
               out + token * out_stride + at, own.data());
      }
  }
}

}  // namespace

#define PER_DTYPE(NAME, T)                                                                        \
  extern "C" void rms_norm_##NAME(const T* x, int64_t xs, int64_t b, T* r, int64_t rs, const T* w, \
                                  T* o, int64_t n, int64_t d, float e, int threads) {             \
    rms_norm<T, T>(x, xs, b, r, rs, w, o, n, d, e, 1, threads);                                      \
  }                                                                                               \
  extern "C" void rms_norm_wide_##NAME(const T* x, int64_t xs, int64_t b, T* r, int64_t rs,        \
                                       const float* w, T* o, int64_t n, int64_t d, float e,       \
                                       int threads) {                                             \
    rms_norm<T, float>(x, xs, b, r, rs, w, o, n, d, e, 0, threads);                                  \
  }                                                                                               \
  extern "C" void silu_and_mul_##NAME(const T* x, int64_t s, T* o, int64_t n, int64_t i,          \
                                      int threads) {                                              \
    gated<T, silu>(x, s, o, n, i, threads);                                                       \
  }                                                                                               \
  extern "C" void gelu_tanh_and_mul_##NAME(const T* x, int64_t s, T* o, int64_t n, int64_t i,     \
                                           int threads) {                                         \
    gated<T, gelu_tanh>(x, s, o, n, i, threads);                                                  \
  }                                                                                               \
  extern "C" void rotate_##NAME(T* q, int64_t qs, int64_t qh, T* k, int64_t ks, int64_t kh,       \
                                int64_t d, const T* c, const T* s, int64_t ts, int64_t n,         \
                                int threads) {                                                    \
    rotate<T>(q, qs, qh, k, ks, kh, d, c, s, ts, n, threads);                                     \
  }                                                                                               \
  extern "C" void decode_attention_##NAME(                                                        \
      const T* q, int64_t qs, const int64_t* tokens, const T* kc, const T* vc, const int64_t* p,  \
      int64_t width, const int64_t* lengths, int64_t n, int64_t h, int64_t kh, int64_t d,         \
      int64_t page, int64_t window, float scale, float cap, T* o, int64_t os, int threads) {      \
    decode_attention<T>(q, qs, tokens, kc, vc, p, width, lengths, n, h, kh, d, page, window,      \
                        scale, cap, o, os, threads);                                              \
  }

PER_DTYPE(f32, float)
PER_DTYPE(bf16, bf16)
