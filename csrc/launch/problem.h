// One call as a flat list of integers: what Python hands over, and what the tests' emulation takes.
//
// Addresses and sizes only, in the order of the list in moe_optimizer/ops/cuda_dispatch_problem.py; a float travels as
// its bits. A count that differs is an error of this package, caught in `problem_from_values`.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "moeopt/fused_experts.h"
#include "moeopt/router.h"

namespace moeopt {

struct Problem {
  FusedExpertsArgs moe;
  RouterArgs router;
};

constexpr int kProblemValues = 36;

inline Problem problem_from_values(const int64_t* values, int64_t count) {
  if (count != kProblemValues) {
    throw std::invalid_argument("problem: got " + std::to_string(count) + " values, expected " +
                                std::to_string(kProblemValues));
  }
  int next = 0;
  const auto number = [&] { return values[next++]; };
  const auto address = [&] { return reinterpret_cast<void*>(values[next++]); };
  const auto code = [&] { return static_cast<int32_t>(values[next++]); };
  Problem problem{};
  FusedExpertsArgs& moe = problem.moe;
  moe.num_tokens = number();
  moe.hidden_size = number();
  moe.intermediate_size = number();
  moe.num_local_experts = number();
  moe.num_global_experts = number();
  moe.top_k = number();
  moe.x = address();
  moe.x_stride = number();
  moe.out = address();
  moe.out_stride = number();
  moe.x_dtype = static_cast<DType>(code());
  moe.w13 = address();
  moe.w2 = address();
  moe.w13_expert_stride = number();
  moe.w13_row_stride = number();
  moe.w2_expert_stride = number();
  moe.w2_row_stride = number();
  moe.weight_dtype = static_cast<DType>(code());
  moe.scale_kind = static_cast<ScaleKind>(code());
  moe.w13_scale = static_cast<const float*>(address());
  moe.w2_scale = static_cast<const float*>(address());
  moe.w13_bias = static_cast<const float*>(address());
  moe.w2_bias = static_cast<const float*>(address());
  moe.topk_weights = static_cast<const float*>(address());
  moe.topk_ids = address();
  moe.ids_are_int64 = number() != 0;
  moe.expert_map = static_cast<const int32_t*>(address());
  moe.activation = static_cast<Activation>(code());
  RouterArgs& router = problem.router;
  router.logits = address();
  router.logits_are_bf16 = number() != 0;
  router.scoring = static_cast<Scoring>(code());
  router.renormalize = number() != 0;
  router.num_groups = code();
  router.topk_groups = code();
  router.bias = static_cast<const float*>(address());
  const auto bits = static_cast<uint32_t>(number());
  std::memcpy(&router.scaling_factor, &bits, sizeof(bits));
  if (next != kProblemValues) throw std::logic_error("problem: the list is read to another length than declared");
  return problem;
}

}  // namespace moeopt
