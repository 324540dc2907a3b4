// The MoE experts of one layer: arguments, and the entry point of the CPU kernels.
//
// No torch here: callers hand over addresses, sizes and strides, so one binary serves every torch.
#pragma once

#include <cstdint>

#include "moeopt/fields.h"

namespace moeopt {

// kFloat4E2M1: codes of four bits, two in a byte, the even column in the low half. Bit 3 is the sign, bits 2 to 0 stand
// for 0, 0.5, 1, 1.5, 2, 3, 4, 6.
enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat8E4M3 = 3, kFloat4E2M1 = 4 };

// How gate and up become the input of the down projection, and where their rows lie in w13.
enum class Activation : int32_t {
  kSilu = 0,       // silu(gate) * up; rows [0, I) gate, [I, 2I) up
  kSwigluOai = 1,  // clamped, gate * sigmoid(1.702 gate) * (up + 1); rows 2i gate, 2i + 1 up
};

// kGroup32: one power of two per 32 columns of a row, as its exponent (E8M0). With kFloat4E2M1 that is MXFP4.
enum class ScaleKind : int32_t { kNone = 0, kBlock128 = 1, kChannel = 2, kGroup32 = 3 };

// What the grouped CUDA kernels multiply, weights x tokens: BF16 x BF16; E4M3 x BF16; E4M3 x E4M3; MXFP4 x BF16;
// INT4 x BF16; MXFP4 x E4M3.
enum class GemmMode { kBf16 = 0, kFp8Weights = 1, kFp8 = 2, kMxfp4Weights = 3, kInt4Weights = 4, kMxfp4 = 5 };

// Instruction sets the kernels are built for, weakest first.
enum class Isa : int32_t { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxTopK = 32;
constexpr int64_t kSizeMultiple = 16;  // H and I; the vector loops rely on it
constexpr int64_t kScaleBlock = 128;
constexpr int64_t kScaleGroup = 32;  // H and I are multiples of it where scale_kind is kGroup32

struct FusedExpertsArgs {
  int64_t num_tokens;          // T
  int64_t hidden_size;         // H
  int64_t intermediate_size;   // I
  int64_t num_local_experts;   // E, the experts in w13 and w2
  int64_t num_global_experts;  // entries of expert_map; unused without a map
  int64_t top_k;

  const void* x;       // [T, H], last dimension contiguous
  int64_t x_stride;    // elements between tokens
  void* out;           // [T, H], dtype of x, last dimension contiguous
  int64_t out_stride;  // elements between tokens
  DType x_dtype;

  // Strides are in elements; those of kFloat4E2M1 in bytes, of which a row has half as many as columns.
  const void* w13;  // [E, 2I, H], last dimension contiguous
  const void* w2;   // [E, H, I], last dimension contiguous
  int64_t w13_expert_stride, w13_row_stride;
  int64_t w2_expert_stride, w2_row_stride;
  DType weight_dtype;

  ScaleKind scale_kind;
  const float* w13_scale;        // contiguous; kBlock128: [E, ceil(2I/128), ceil(H/128)]; kChannel: [E, 2I]
  const float* w2_scale;         // contiguous; kBlock128: [E, ceil(H/128), ceil(I/128)]; kChannel: [E, H]
  const uint8_t* w13_exponents;  // contiguous; kGroup32: [E, 2I, H / 32], each of a scale 2^(byte - 127)
  const uint8_t* w2_exponents;   // contiguous; kGroup32: [E, H, I / 32]
  const float* w13_bias;         // contiguous [E, 2I], or null
  const float* w2_bias;          // contiguous [E, H], or null

  const float* topk_weights;  // contiguous [T, k]
  const void* topk_ids;       // contiguous [T, k], global expert ids, negative: skip
  bool ids_are_int64;
  const int32_t* expert_map;  // contiguous [num_global_experts] -> local id or negative; or null

  Activation activation;

  MOEOPT_FIELDS(num_tokens, hidden_size, intermediate_size, num_local_experts, num_global_experts, top_k, x, x_stride,
                out, out_stride, x_dtype, w13, w2, w13_expert_stride, w13_row_stride, w2_expert_stride, w2_row_stride,
                weight_dtype, scale_kind, w13_scale, w2_scale, w13_exponents, w2_exponents, w13_bias, w2_bias,
                topk_weights, topk_ids, ids_are_int64, expert_map, activation)
};

// Best instruction set of this machine that was compiled in.
Isa best_isa();
const char* isa_name(Isa isa);

// A routing entry that names an expert which does not exist.
struct RoutingError {
  int64_t token, slot, id, limit;
  bool mapped;  // the id is one that expert_map returned
};

// Computes out[t] = sum over the valid slots j of topk_weights[t, j] * expert(topk_ids[t, j])(x[t]).
//
// Runs on the OpenMP threads of the caller. Returns false, with *error filled and nothing written, if an
// id is outside [.., E); the caller has checked everything else. Throws std::bad_alloc.
// The result does not depend on the number of threads, nor on the other tokens in the batch.
bool fused_experts_cpu(const FusedExpertsArgs& args, Isa isa, RoutingError* error);

}  // namespace moeopt
