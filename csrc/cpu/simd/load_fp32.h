// Registers of FP32 from memory in any of the formats of activations. Internal linkage: see number_formats.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "../number_formats.h"

namespace moeopt {
namespace {

template <typename Simd>
typename Simd::Vec load_as_fp32(const float* p) {
  return Simd::load(p);
}
template <typename Simd>
typename Simd::Vec load_as_fp32(const BFloat16* p) {
  return Simd::load_bf16(p);
}
template <typename Simd>
typename Simd::Vec load_as_fp32(const Float16* p) {
  return Simd::load_fp16(p);
}

// The first `count` of a register, zeros behind them.
template <typename Simd, typename T>
typename Simd::Vec load_part(const T* p, int64_t count) {
  T part[Simd::kLanes] = {};
  std::memcpy(part, p, count * sizeof(T));
  return load_as_fp32<Simd>(part);
}

}  // namespace
}  // namespace moeopt
