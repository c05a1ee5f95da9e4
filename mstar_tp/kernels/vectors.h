// Vectors of 16 lanes, 64 bytes of float32; narrower machines split them.

#pragma once

#include <cstdint>
#include <cstring>

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
inline void store(bf16* p, vf v) {
  const vu bits = (vu)v;
  const vu nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu is_nan = (vu)(v != v);
  const vh h = __builtin_convertvector((nearest & ~is_nan) | (0x7fc0 & is_nan), vh);
  std::memcpy(p, &h, sizeof h);
}

}  // namespace
