// Products of rows that are grouped by whose weights they take, for float32 and bfloat16. Weights lie
// as they were installed: nothing is packed.
//
// One thread takes a sum in one order that depends on the row alone, so a row's bits depend neither
// on the other rows nor on the number of threads. Where the processor multiplies pairs of bfloat16,
// A x is rounded to it before B, as the model's own dtype has it; elsewhere it is kept in float32.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "floats.h"
#include "vectors.h"

namespace {

constexpr int FEW = 4;         // rows, and weights' rows, at once
constexpr int64_t TILE = 64;   // rows that one thread takes through the same weights
constexpr int64_t CHUNK = 256;  // outputs that one thread takes at a time

// How a machine multiplies: `hidden` is what it keeps A x in, `LANES` values at once go into a sum.
template <typename T>
struct Kind {
  using hidden = float;
  static constexpr int LANES = W;
  static vf add(vf sum, const T* a, const T* b) { return sum + load(a) * load(b); }
  static vf add_some(vf sum, const T* a, const T* b, int64_t count) {
    T some[2][W] = {};
    std::memcpy(some[0], a, count * sizeof(T));
    std::memcpy(some[1], b, count * sizeof(T));
    return add(sum, some[0], some[1]);
  }
};

#ifdef __AVX512BF16__
template <>
struct Kind<bf16> {
  using hidden = bf16;
  static constexpr int LANES = 2 * W;
  static vf add(vf sum, const bf16* a, const bf16* b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(a),
                                (__m512bh)_mm512_loadu_si512(b));
  }
  static vf add_some(vf sum, const bf16* a, const bf16* b, int64_t count) {
    const __mmask32 some = (uint32_t(1) << count) - 1;
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_maskz_loadu_epi16(some, a),
                                (__m512bh)_mm512_maskz_loadu_epi16(some, b));
  }
};
#endif

// out[r][m] = w[m] . x[r], for R rows of x and M rows of w, these side by side.
template <int R, int M, typename T, typename H>
inline void dots(const T* const* x, const T* w, int64_t in, H* out, int64_t stride) {
  using K = Kind<T>;
  vf all[R * M] = {};
  int64_t i = 0;
  for (; i + K::LANES <= in; i += K::LANES) {
    // The next M rows of w lie behind these.
    if constexpr (R == 1)
      for (int m = 0; m < M; ++m) __builtin_prefetch(w + (M + m) * in + i);
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) all[r * M + m] = K::add(all[r * M + m], w + m * in + i, x[r] + i);
  }
  if (i < in)
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m)
        all[r * M + m] = K::add_some(all[r * M + m], w + m * in + i, x[r] + i, in - i);
  if constexpr (R * M == W) {
    float each[W];
    store(each, sums(all));
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) narrow(each[r * M + m], out + r * stride + m);
  } else {
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) narrow(sum(all[r * M + m]), out + r * stride + m);
  }
}

template <int M, typename T, typename H>
inline void dots_of(const T* const* x, int64_t rows, const T* w, int64_t in, H* out,
                    int64_t stride) {
  int64_t r = 0;
  for (; r + FEW <= rows; r += FEW) dots<FEW, M>(x + r, w, in, out + r * stride, stride);
  for (; r < rows; ++r) dots<1, M>(x + r, w, in, out + r * stride, stride);
}

// Rows of x times `count` rows of w.
template <typename T, typename H>
inline void dots_all(const T* const* x, int64_t rows, const T* w, int64_t count, int64_t in, H* out,
                     int64_t stride) {
  int64_t m = 0;
  for (; m + FEW <= count; m += FEW) dots_of<FEW>(x, rows, w + m * in, in, out + m, stride);
  for (; m < count; ++m) dots_of<1>(x, rows, w + m * in, in, out + m, stride);
}

// y[r][0..V*W) += sum over k of h[r][k] * b[k], for R rows.
template <int R, int V, typename T>
inline void expand(const float* h, int64_t columns, const T* b, int64_t out, int64_t rank,
                   T* const* y, int64_t at) {
  vf all[R][V] = {};
  for (int64_t k = 0; k < rank; ++k) {
    vf weights[V];
    for (int v = 0; v < V; ++v) weights[v] = load(b + k * out + v * W);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) all[r][v] += h[r * columns + k] * weights[v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      T* to = y[r] + at + v * W;
      store(to, load(to) + all[r][v]);
    }
}

#ifdef __AVX512BF16__
// The same, two ranks at a time: V counts vectors of W outputs, in pairs.
template <int R, int V>
inline void expand(const bf16* h, int64_t columns, const bf16* b, int64_t out, int64_t rank,
                   bf16* const* y, int64_t at) {
  static_assert(V % 2 == 0, "pairs of vectors are woven");
  alignas(64) static constexpr uint16_t WEAVE[2][32] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  const __m512i low = _mm512_load_si512(WEAVE[0]), high = _mm512_load_si512(WEAVE[1]);
  __m512 all[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) all[r][v] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + 2 <= rank; k += 2) {
    __m512bh weights[V];
    for (int v = 0; v < V; v += 2) {
      if constexpr (R == 1) {  // the piece that comes after this one
        __builtin_prefetch(b + k * out + (V + v) * W);
        __builtin_prefetch(b + (k + 1) * out + (V + v) * W);
      }
      const __m512i even = _mm512_loadu_si512(b + k * out + v * W);
      const __m512i odd = _mm512_loadu_si512(b + (k + 1) * out + v * W);
      weights[v] = (__m512bh)_mm512_permutex2var_epi16(even, low, odd);
      weights[v + 1] = (__m512bh)_mm512_permutex2var_epi16(even, high, odd);
    }
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, h + r * columns + k, 4);
      for (int v = 0; v < V; ++v)
        all[r][v] = _mm512_dpbf16_ps(all[r][v], weights[v], (__m512bh)_mm512_set1_epi32(pair));
    }
  }
  if (k < rank)
    for (int v = 0; v < V; ++v) {
      const __m512bh weights = (__m512bh)_mm512_cvtepu16_epi32(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + k * out + v * W)));
      for (int r = 0; r < R; ++r)
        all[r][v] = _mm512_dpbf16_ps(all[r][v], weights,
                                     (__m512bh)_mm512_set1_epi32(h[r * columns + k].bits));
    }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      bf16* to = y[r] + at + v * W;
      store(to, load(to) + (vf)all[r][v]);
    }
}
#endif

template <int R, int V, typename T, typename H>
inline int64_t expand_rows(int64_t r, int64_t rows, const H* h, int64_t columns, const T* b,
                           int64_t out, int64_t rank, T* const* y, int64_t at) {
  for (; r + R <= rows; r += R) expand<R, V>(h + r * columns, columns, b, out, rank, y + r, at);
  return r;
}

// Outputs first..stop, all of one slice, of a slot's rows. h stands at the slice, b at the slot.
template <typename T, typename H>
inline void expand_all(const H* h, int64_t columns, const T* b, int64_t out, int64_t rank,
                       T* const* y, int64_t rows, int64_t first, int64_t stop) {
  int64_t o = first;
  // A lone row takes many outputs at once, so that each row of B is read in long pieces.
  if (rows == 1)
    for (; o + 16 * W <= stop; o += 16 * W) expand<1, 16>(h, columns, b + o, out, rank, y, o);
  for (; o + 2 * W <= stop; o += 2 * W) {
    int64_t r = expand_rows<8, 2>(0, rows, h, columns, b + o, out, rank, y, o);
    r = expand_rows<4, 2>(r, rows, h, columns, b + o, out, rank, y, o);
    expand_rows<1, 2>(r, rows, h, columns, b + o, out, rank, y, o);
  }
  if (o == stop) return;
  // What is left goes through copies that are wide enough; a row's sums are the same.
  const int64_t left = stop - o;
  std::vector<T> some(rank * 2 * W);
  for (int64_t k = 0; k < rank; ++k)
    std::memcpy(some.data() + k * 2 * W, b + k * out + o, left * sizeof(T));
  for (int64_t r = 0; r < rows; ++r) {
    T part[2 * W] = {};
    T* to = part;
    std::memcpy(part, y[r] + o, left * sizeof(T));
    expand<1, 2>(h + r * columns, columns, some.data(), int64_t(2 * W), rank, &to, int64_t(0));
    std::memcpy(y[r] + o, part, left * sizeof(T));
  }
}

struct Tile {  // some of a group's rows
  int64_t group, first, count;
};

std::vector<Tile> tiles_of(const int64_t* indptr, int64_t groups) {
  std::vector<Tile> tiles;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t first = indptr[g]; first < indptr[g + 1]; first += TILE)
      tiles.push_back({g, first, first + TILE < indptr[g + 1] ? TILE : indptr[g + 1] - first});
  return tiles;
}

}  // namespace
