// How router logits become expert ids and weights: the arguments. The kernels are in router.cuh.
#pragma once

#include <cstdint>

namespace moeopt {

enum class Scoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

constexpr int64_t kMaxGroups = 32;  // one lane per group

struct RouterArgs {
  const void* logits;  // [T, num_experts] contiguous, FP32 or BF16; null: top-k ids and weights are given
  bool logits_are_bf16;
  Scoring scoring;
  bool renormalize;
  int32_t num_groups;    // 1: no groups. Divides num_experts
  int32_t topk_groups;   // groups kept per token
  const float* bias;     // [num_experts] added for the choice only, or null
  float scaling_factor;  // of the weights, last
};

}  // namespace moeopt
