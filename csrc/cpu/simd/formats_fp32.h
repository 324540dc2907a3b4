// Formats whose activations are FP32 and whose weights become FP32 when they are loaded. `Simd` is an instruction set;
// see formats_avx512.h. Internal linkage: see number_formats.h.
#pragma once

#include <cstring>

#include "../number_formats.h"
#include "experts.h"

namespace moeopt {
namespace {

// Common to all of them. X is the dtype of x and out.
template <typename S, typename X>
struct Fp32Format {
  using Simd = S;
  using Vec = typename S::Vec;
  using Operand = Vec;
  using Output = X;
  static constexpr int kMaxTokens = S::kMaxTokens;
  static constexpr int kTileTokens = S::kTileTokens;  // of a tile among several
  static constexpr int kWideTokens = 0;               // of a tile over eight rows; 0: never
  // How far ahead of reading it a row is fetched while one tile of tokens passes (dot_streams.h); 0: not at all.
  static constexpr int64_t row_ahead_bytes(int /*tokens*/) { return 2048; }
  static constexpr int64_t kActivationBytes = 4;
  static constexpr float kUnit = 1.0f;  // weights are multiplied by this with their scale
  static constexpr bool kDecodes = false;
  static constexpr bool kGroupScales = false;  // of 32 columns or more, see group_tile
  // Of group_tile: sums of a token and row within a step; whether few tokens have a loop for each kind of scales.
  static constexpr int kGroupSums = 1;
  static constexpr bool kLoopsByScales = false;
  using Groups = ExponentGroups;
  static constexpr int kColumnsPerElement = 1;
  static constexpr bool kPacks = sizeof(X) != sizeof(float);
  static constexpr int kStep = S::kLanes, kParts = 1;

  static Vec zero() { return S::set1(0.0f); }
  static Vec broadcast(float v) { return S::set1(v); }
  static Vec multiply_add(Operand a, Operand b, Vec acc) { return S::fmadd(a, b, acc); }
  static Vec scale_add(Vec acc, Vec factor, Vec total) { return S::fmadd(acc, factor, total); }
  static void store_sums(const Vec* v, float* out) { S::store_sums(v, out); }
  static void store_output(const float* values, X* out) { S::store_rounded(values, out); }

  // Activations in the order of k.
  static Operand activation(const char* x, int64_t k, int part) {
    return S::load(reinterpret_cast<const float*>(x) + k + part * S::kLanes);
  }
  static void store_activations(const float* values, char* row, int64_t column) {
    std::memcpy(reinterpret_cast<float*>(row) + column, values, kRows * sizeof(float));
  }
};

template <typename S>
struct Fp32Weights : Fp32Format<S, float> {
  using Weight = float;
  using Decoded = Fp32Weights;
  // Measured: prefetches slow down what is one read after the other, at one to three tokens.
  static constexpr int64_t row_ahead_bytes(int /*tokens*/) { return 0; }
  static typename S::Vec weight(const Weight* w, int /*part*/) { return S::load(w); }
};

template <typename S>
struct Fp16Weights : Fp32Format<S, Float16> {
  using Weight = Float16;
  using Decoded = Fp16Weights;
  static constexpr int kWideTokens = S::kWideTokensOfFp16;
  static typename S::Vec weight(const Weight* w, int /*part*/) { return S::load_fp16(w); }
};

// FP8 after decode_row: FP16 that lack a factor of 256.
template <typename S, typename X>
struct DecodedFp8Weights : Fp32Format<S, X> {
  using Weight = Float16;
  using Decoded = DecodedFp8Weights;
  static constexpr float kUnit = 256.0f;
  static typename S::Vec weight(const Weight* w, int /*part*/) { return S::load_fp16(w); }
};

// Weights in four bits with an exponent per 32 columns, decoded by group_tile. A scale byte of 0 (2^-127) counts as
// zero, 255 (not a number) as infinite.
template <typename S, typename X>
struct Fp4Format : Fp32Format<S, X> {
  using Weight = Float4E2M1Pair;
  using Decoded = Fp4Format;
  static constexpr bool kGroupScales = true;
  static constexpr int kColumnsPerElement = 2;
  static constexpr bool kPacks = true;
};

// The kernels of weights of one kind for each dtype of x. The activations are FP32 with any, and so are the products.
template <template <typename X> class Weights>
const ExpertKernels* kernels_of_x(DType x_dtype) {
  switch (x_dtype) {
    case DType::kFloat32: return &kExperts<Weights<float>>;
    case DType::kBFloat16: return &kExperts<Weights<BFloat16>, Weights<float>>;
    case DType::kFloat16: return &kExperts<Weights<Float16>, Weights<float>>;
    case DType::kFloat8E4M3:
    case DType::kFloat4E2M1: return nullptr;
  }
  return nullptr;
}

template <typename S, typename Bf16Weights, template <typename X> class Fp8Weights,
          template <typename X> class Fp4Weights>
const ExpertKernels* fp32_kernels(const FusedExpertsArgs& args) {
  if (args.weight_dtype == DType::kFloat4E2M1) return kernels_of_x<Fp4Weights>(args.x_dtype);
  if (args.weight_dtype == DType::kFloat8E4M3) return kernels_of_x<Fp8Weights>(args.x_dtype);
  switch (args.x_dtype) {
    case DType::kFloat32: return &kExperts<Fp32Weights<S>>;
    case DType::kBFloat16: return &kExperts<Bf16Weights>;
    case DType::kFloat16: return &kExperts<Fp16Weights<S>>;
    case DType::kFloat8E4M3:
    case DType::kFloat4E2M1: return nullptr;
  }
  return nullptr;
}

}  // namespace
}  // namespace moeopt
