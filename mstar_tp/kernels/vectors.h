// Vectors of 16 lanes, 64 bytes of float32; narrower machines split them.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "floats.h"

namespace {

constexpr int W = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline vf load(const bf16* p) {
  vh h;
  std::memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
#ifdef __AVX512BF16__
inline void store(bf16* p, vf v) {  // as below, but a subnormal result becomes zero
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
#else
inline void store(bf16* p, vf v) {
  const vu bits = (vu)v;
  const vu nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu is_nan = (vu)(v != v);
  const vh h = __builtin_convertvector((nearest & ~is_nan) | (0x7fc0 & is_nan), vh);
  std::memcpy(p, &h, sizeof h);
}
#endif

// Halves are added until one lane is left: `sum` of one vector and `sums` of sixteen in one order.
inline float sum(vf v) {
  typedef float v8 __attribute__((vector_size(32)));
  typedef float v4 __attribute__((vector_size(16)));
  const v8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}
inline vf sums(const vf* v) {
  vf eight[8], four[4], two[2];
  for (int i = 0; i < 8; ++i)
    eight[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19,
                                       20, 21, 22, 23) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25,
                                       26, 27, 28, 29, 30, 31);
  for (int i = 0; i < 4; ++i)
    four[i] = __builtin_shufflevector(eight[2 * i], eight[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16,
                                      17, 18, 19, 24, 25, 26, 27) +
              __builtin_shufflevector(eight[2 * i], eight[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20,
                                      21, 22, 23, 28, 29, 30, 31);
  for (int i = 0; i < 2; ++i)
    two[i] = __builtin_shufflevector(four[2 * i], four[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17,
                                     20, 21, 24, 25, 28, 29) +
             __builtin_shufflevector(four[2 * i], four[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18,
                                     19, 22, 23, 26, 27, 30, 31);
  return __builtin_shufflevector(two[0], two[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26,
                                 28, 30) +
         __builtin_shufflevector(two[0], two[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27,
                                 29, 31);
}

}  // namespace
