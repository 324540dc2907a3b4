// Scalar conversions between FP32 and the stored formats.
//
// Internal linkage on purpose: this header is compiled once per instruction set, and a shared inline
// function could be linked in its AVX-512 version into the path of a machine without AVX-512.
#pragma once

#include <cstdint>
#include <cstring>

namespace moeopt {
namespace {

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float bf16_to_float(uint16_t value) { return float_from_bits(static_cast<uint32_t>(value) << 16); }

// Round to nearest even; NaN stays NaN.
inline uint16_t bf16_from_float(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Exact: moves exponent and mantissa into place, then multiplies by 2^112, which also normalises subnormals.
inline float fp16_to_float(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(value & 0x7fffu) << 13;
  if ((value & 0x7c00u) == 0x7c00u) return float_from_bits(sign | 0x7f800000u | rest);
  return float_from_bits(bits_of(float_from_bits(rest) * 0x1p112f) | sign);
}

// Round to nearest even, overflow to infinity, subnormals kept.
inline uint16_t fp16_from_float(float value) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: the adder rounds at the right bit
    return sign | static_cast<uint16_t>(bits_of(float_from_bits(magnitude) + 0.5f) - bits_of(0.5f));
  }
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

// E4M3 "fn": bias 7, no infinities, NaN where all seven low bits are set.
inline float fp8_e4m3_to_float(uint8_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x80u) << 24;
  const uint32_t rest = static_cast<uint32_t>(value & 0x7fu);
  if (rest == 0x7fu) return float_from_bits(sign | 0x7fc00000u);
  if (rest < 8u) return float_from_bits(bits_of(static_cast<float>(rest) * 0x1p-9f) | sign);
  return float_from_bits(((rest << 20) + (120u << 23)) | sign);
}

// E2M1: bit 3 is the sign.
inline float fp4_e2m1_to_float(uint8_t code) {
  constexpr float kMagnitude[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return (code & 8u) ? -kMagnitude[code & 7u] : kMagnitude[code & 7u];
}

// E8M0: 2^(value - 127); 255 is NaN.
inline float e8m0_to_float(uint8_t value) {
  if (value == 0) return 0x1p-127f;
  return float_from_bits(value == 255 ? 0x7fc00000u : static_cast<uint32_t>(value) << 23);
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
// Two columns, the even one in the low half.
struct Float4E2M1Pair {
  uint8_t bits;
};

// The same of INT4 codes.
struct Int4Pair {
  uint8_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return bf16_to_float(value.bits); }
inline float to_float(Float16 value) { return fp16_to_float(value.bits); }
inline float to_float(Float8E4M3 value) { return fp8_e4m3_to_float(value.bits); }

inline void from_float(float value, float* out) { *out = value; }
inline void from_float(float value, BFloat16* out) { out->bits = bf16_from_float(value); }
inline void from_float(float value, Float16* out) { out->bits = fp16_from_float(value); }

}  // namespace
}  // namespace moeopt
