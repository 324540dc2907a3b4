// The gate product and top-k of few tokens: checks and geometry. Plain arithmetic, no GPU.
#pragma once

#include "launch/geometry.h"
#include "moeopt/gate_topk.cuh"

namespace moeopt {

inline void check_gate_router(const GateTopkArgs& gate, const RouterArgs& router) {
  const int64_t groups = router.num_groups;
  expect_at_least("gate_topk: groups", groups, 1);
  expect_at_most("gate_topk: groups", groups, kMaxGroups);
  expect_multiple("gate_topk: E", gate.num_experts, groups);
  expect_at_least("gate_topk: groups kept", router.topk_groups, 1);
  expect_at_most("gate_topk: groups kept", router.topk_groups, groups);
  expect_at_most("gate_topk: k", gate.top_k, router.topk_groups * (gate.num_experts / groups));
}

inline GateTopkLaunch gate_topk_launch(const GateTopkArgs& gate, const RouterArgs& router) {
  expect_at_least("gate_topk: T", gate.num_tokens, 1);
  expect_at_most("gate_topk: T", gate.num_tokens, kGateTokens);
  expect_at_least("gate_topk: E", gate.num_experts, 1);
  expect_at_most("gate_topk: E", gate.num_experts, kMaxExperts);
  expect_at_least("gate_topk: k", gate.top_k, 1);
  expect_at_most("gate_topk: k", gate.top_k, std::min(kMaxTopK, gate.num_experts));
  check_gate_router(gate, router);
  // 16 bytes are loaded at a time.
  expect_at_least("gate_topk: H", gate.hidden_size, 8);
  expect_at_most("gate_topk: H", gate.hidden_size, int64_t{1} << 24);
  expect_multiple("gate_topk: H", gate.hidden_size, 8);
  expect_multiple("gate_topk: elements between tokens", gate.x_stride, 8);
  expect_multiple("gate_topk: elements between experts", gate.gate_stride, 8);
  expect_multiple("gate_topk: address of x", static_cast<int64_t>(reinterpret_cast<uintptr_t>(gate.x)), 16);
  expect_multiple("gate_topk: address of the gate", static_cast<int64_t>(reinterpret_cast<uintptr_t>(gate.gate)), 16);
  GateTopkLaunch launch{};
  launch.blocks = static_cast<int32_t>(gate.num_experts);
  launch.threads = static_cast<int32_t>(32 * gate.num_tokens);
  const int64_t routed = ceil_div64(gate.num_tokens, launch.blocks);  // tokens that a block chooses for, at most
  launch.shared_bytes = static_cast<int32_t>(routed * gate.num_experts * kGateScratchPerExpert) + kAlignmentSlack;
  return launch;
}

}  // namespace moeopt
