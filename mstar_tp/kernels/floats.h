// Two-byte floats as float32 and back, rounding to nearest, ties to even; NaN stays NaN.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return float_of(uint32_t(x.bits) << 16); }
inline float widen(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
  if (rest >= 0x7c00u << 13) return float_of(sign | (rest + ((255u - 31u) << 23)));  // inf, NaN
  // 2^112 moves the exponent's bias from 15 to 127, and makes a subnormal a normal number.
  return float_of(sign | bits_of(float_of(rest) * 5.192296858534828e33f));
}

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, bf16* out) {
  const uint32_t bits = bits_of(x);
  out->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, f16* out) {
  const uint32_t sign = bits_of(x) & 0x80000000u, rest = bits_of(x) ^ sign;
  uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00;
  } else if (rest >= (127u + 16u) << 23) {  // 2^16 and more, which no rounding brings back
    half = 0x7c00;
  } else if (rest < (127u - 14u) << 23) {  // subnormal: adding 1/2 rounds at its last bit
    half = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
  } else {
    half = (rest - ((127u - 15u) << 23) + 0xfff + ((rest >> 13) & 1)) >> 13;
  }
  out->bits = uint16_t(half | sign >> 16);
}

}  // namespace
