// The gate of a MoE layer: how router logits become expert ids and weights. The kernels are in router.cuh (CUDA) and
// cpu/topk_router.cpp.
#pragma once

#include <cstdint>

#include "moeopt/fields.h"
#include "moeopt/fused_experts.h"

namespace moeopt {

enum class Scoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

constexpr int64_t kMaxGroups = 32;  // one lane per group

struct RouterArgs {
  const void* logits;    // [T, num_experts], last dimension contiguous; null: top-k ids and weights are given
  bool logits_are_bf16;  // else FP32; CUDA only
  Scoring scoring;
  bool renormalize;
  int32_t num_groups;    // 1: no groups. Divides num_experts
  int32_t topk_groups;   // groups kept per token
  const float* bias;     // [num_experts] added for the choice only, or null
  float scaling_factor;  // of the weights, last

  MOEOPT_FIELDS(logits, logits_are_bf16, scoring, renormalize, num_groups, topk_groups, bias, scaling_factor)
};

// One call of the gate on the CPU.
struct TopkRouterArgs {
  int64_t num_tokens, num_experts, top_k;
  int64_t logits_stride;  // elements between tokens
  DType logits_dtype;
  float* topk_weights;  // out, contiguous [T, k], best first
  int32_t* topk_ids;    // out, contiguous [T, k]

  MOEOPT_FIELDS(num_tokens, num_experts, top_k, logits_stride, logits_dtype, topk_weights, topk_ids)
};

// The lower id wins a tie. Runs on the OpenMP threads of the caller. Throws std::bad_alloc.
void topk_router_cpu(const RouterArgs& router, const TopkRouterArgs& args);

}  // namespace moeopt
