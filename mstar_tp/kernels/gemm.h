// A weight packed once, and rows times a panel of it, for float32 and bfloat16.
//
// A packed weight is panels of N outputs, side by side. A panel goes through the inputs in steps: each
// holds, output by output, the DEPTH inputs that one instruction multiplies and adds (two in bfloat16,
// one in float32). A decode step reads it from front to back, each byte once. Absent outputs and inputs
// are zeros.
//
// One thread takes an output's sum over all inputs in their order, so a row's bits depend neither on
// the other rows nor on the number of threads.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "floats.h"
#include "vectors.h"

namespace {

constexpr int P = 2;        // vectors of a panel
constexpr int N = P * W;    // outputs of a panel
constexpr int MOST = 14;    // rows at once: MOST * P sums and P weights fill the registers

template <typename T>
struct Arithmetic {  // none that is worth a packed weight
  static constexpr int depth = 1;
  static constexpr bool here = false;
};

#ifdef __AVX512F__
template <>
struct Arithmetic<float> {
  static constexpr int depth = 1;
  static constexpr bool here = true;
  using lanes = __m512;
  static lanes weights(const float* p) { return _mm512_loadu_ps(p); }
  static lanes spread(const float* x) { return _mm512_set1_ps(*x); }
  static lanes last(const float* x) { return spread(x); }
  static __m512 add(__m512 sum, lanes w, lanes x) { return _mm512_fmadd_ps(w, x, sum); }
};
#endif

#ifdef __AVX512BF16__
template <>
struct Arithmetic<bf16> {
  static constexpr int depth = 2;
  static constexpr bool here = true;
  using lanes = __m512bh;
  static lanes weights(const bf16* p) { return (lanes)_mm512_loadu_si512(p); }
  static lanes spread(const bf16* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return (lanes)_mm512_set1_epi32(pair);
  }
  static lanes last(const bf16* x) { return (lanes)_mm512_set1_epi32(x->bits); }
  static __m512 add(__m512 sum, lanes w, lanes x) { return _mm512_dpbf16_ps(sum, w, x); }
};
#endif

template <typename T>
constexpr int64_t panel_inputs(int64_t in) {
  constexpr int depth = Arithmetic<T>::depth;
  return (in + depth - 1) / depth * depth;
}

template <typename T>
void pack(const T* w, int64_t stride, int64_t out, int64_t in, T* to, int threads) {
  constexpr int depth = Arithmetic<T>::depth;
  const int64_t inputs = panel_inputs<T>(in), panels = (out + N - 1) / N;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t k = 0; k < inputs; ++k)
      for (int64_t n = 0; n < N; ++n) {
        const int64_t o = p * N + n;
        T value{};
        if (o < out && k < in) value = w[o * stride + k];
        to[p * inputs * N + k / depth * depth * N + n * depth + k % depth] = value;
      }
}

// `rows`, at most R, times one panel. Only a machine with some Arithmetic has it and calls it.
template <int R, typename T>
void multiply_rows(int64_t rows, const T* x, int64_t x_stride, const T* w, int64_t in,
                   const float* bias, int64_t cols, T* y, int64_t y_stride);

#ifdef __AVX512F__

// R rows times one panel; `cols` of its outputs are real.
template <int R, typename T>
void multiply(const T* x, int64_t x_stride, const T* w, int64_t in, const float* bias, int64_t cols,
              T* y, int64_t y_stride) {
  using A = Arithmetic<T>;
  __m512 sums[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sums[r][p] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + A::depth <= in; k += A::depth, w += N * A::depth) {
    typename A::lanes weights[P];
    for (int p = 0; p < P; ++p) weights[p] = A::weights(w + p * W * A::depth);
    for (int r = 0; r < R; ++r) {
      const typename A::lanes spread = A::spread(x + r * x_stride + k);
      for (int p = 0; p < P; ++p) sums[r][p] = A::add(sums[r][p], weights[p], spread);
    }
  }
  if (k < in)
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p)
        sums[r][p] = A::add(sums[r][p], A::weights(w + p * W * A::depth),
                            A::last(x + r * x_stride + k));
  for (int p = 0; p < P; ++p) {
    const int64_t real = cols - p * W;
    const vf plus = load(bias + p * W);
    for (int r = 0; r < R; ++r) {
      const vf sum = (vf)sums[r][p] + plus;
      T* to = y + r * y_stride + p * W;
      if (real >= W) {
        store(to, sum);
      } else if (real > 0) {
        T all[W];
        store(all, sum);
        std::memcpy(to, all, real * sizeof(T));
      }
    }
  }
}

template <int R, typename T>
void multiply_rows(int64_t rows, const T* x, int64_t x_stride, const T* w, int64_t in,
                   const float* bias, int64_t cols, T* y, int64_t y_stride) {
  if constexpr (R > 1)
    if (rows < R)
      return multiply_rows<R - 1>(rows, x, x_stride, w, in, bias, cols, y, y_stride);
  multiply<R>(x, x_stride, w, in, bias, cols, y, y_stride);
}

#endif

}  // namespace
