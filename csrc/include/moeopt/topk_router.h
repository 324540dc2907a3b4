// The gate of a MoE layer on the CPU: router logits to expert ids and weights.
#pragma once

#include <cstdint>

#include "moeopt/fused_experts.h"
#include "moeopt/router.h"

namespace moeopt {

struct TopkRouterArgs {
  int64_t num_tokens, num_experts, top_k;
  const void* logits;      // [T, E], last dimension contiguous
  int64_t logits_stride;   // elements between tokens
  DType logits_dtype;
  Scoring scoring;
  bool renormalize;
  int64_t num_groups;      // 1: none
  int64_t kept_groups;     // groups a token may choose from
  const float* score_bias; // contiguous [E], added for the choice only; or null
  float scaling_factor;    // of the weights

  float* topk_weights;  // out, contiguous [T, k], best first
  int32_t* topk_ids;    // out, contiguous [T, k]
};

// The lower id wins a tie. Runs on the OpenMP threads of the caller. Throws std::bad_alloc.
void topk_router_cpu(const TopkRouterArgs& args);

}  // namespace moeopt
