// The gate product and top-k of few tokens: what a call takes, checks and geometry. Plain arithmetic, no GPU.
#pragma once

#include "launch/gate_topk_problem.h"
#include "launch/geometry.h"
#include "moeopt/gate_topk.cuh"

namespace moeopt {

// Calls `use(halves, groups)`, both std::integral_constant, for the compiled kernel that the launch asks for.
template <typename Use>
void with_gate_kernel(const GateTopkLaunch& launch, Use use) {
  const auto with_groups = [&](auto halves) {
    if (launch.token_groups == 1) return use(halves, std::integral_constant<int, 1>());
    use(halves, std::integral_constant<int, 2>());
  };
  if (launch.halves == 1) return with_groups(std::integral_constant<int, 1>());
  with_groups(std::integral_constant<int, 2>());
}

inline int32_t gate_units(const GateTopkProblem& gate) {
  return static_cast<int32_t>(ceil_div64(gate.num_experts, kGateUnit));
}

// `bytes`: of all parts together.
inline GateShared gate_shared(const GateTopkProblem& gate, const GateTopkLaunch& launch, int32_t* bytes) {
  const auto tokens = static_cast<int32_t>(gate.num_tokens), units = gate_units(gate);
  const auto slots = static_cast<int32_t>(ceil_div64(tokens, launch.cluster_blocks));  // tokens that a block routes
  const auto fragments = static_cast<int32_t>(kGateWarps * launch.units_per_block * launch.token_groups *
                                              ceil_div64(tokens, kGateColumns * launch.token_groups));
  GateShared at{};
  at.logits = kGateBarrierBytes;
  at.outgoing = at.logits + slots * units * 16;
  at.partial = at.outgoing + launch.units_per_block * tokens * 16;
  at.scratch = at.partial + fragments * kGateUnit * kGateColumns * 4;
  *bytes = at.scratch + std::min(slots, kGateWarps) * units * kGateUnit * 8;
  return at;
}

inline void check_gate_router(const GateTopkProblem& gate, const RouterArgs& router) {
  const int64_t groups = router.num_groups;
  expect_at_least("gate_topk: groups", groups, 1);
  expect_at_most("gate_topk: groups", groups, kMaxGroups);
  expect_multiple("gate_topk: E", gate.num_experts, groups);
  expect_at_least("gate_topk: groups kept", router.topk_groups, 1);
  expect_at_most("gate_topk: groups kept", router.topk_groups, groups);
  expect_at_most("gate_topk: k", gate.top_k, router.topk_groups * (gate.num_experts / groups));
}

inline GateTopkLaunch gate_topk_launch(const GateTopkProblem& gate, const RouterArgs& router) {
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
  const int32_t units = gate_units(gate);
  GateTopkLaunch launch{};
  // At least two: st.async is an illegal instruction without a cluster.
  launch.cluster_blocks = static_cast<int32_t>(gate.cluster_blocks);
  if (gate.cluster_blocks == 0) {
    launch.cluster_blocks = 2;
    while (launch.cluster_blocks < std::min(units, kGateBlocks)) launch.cluster_blocks *= 2;
  }
  const int32_t blocks = launch.cluster_blocks;
  if (blocks < 2 || blocks > kGateBlocks || (blocks & (blocks - 1))) {
    refuse("gate_topk: blocks of the cluster", gate.cluster_blocks, "2, 4, 8 or 16, or 0 to have them chosen");
  }
  launch.units_per_block = static_cast<int32_t>(ceil_div64(units, blocks));
  launch.halves = launch.units_per_block == 1 ? 1 : 2;
  const auto tokens = static_cast<int32_t>(gate.num_tokens);
  launch.token_groups = tokens <= kGateColumns ? 1 : 2;
  gate_shared(gate, launch, &launch.shared_bytes);
  launch.shared_bytes += kAlignmentSlack;
  expect_at_most("gate_topk: bytes of shared memory", launch.shared_bytes, kSharedLimit);
  return launch;
}

inline GateTopkArgs gate_topk_arguments(const GateTopkProblem& gate, const GateTopkLaunch& launch) {
  int32_t bytes = 0, log2 = 0;
  while (1 << log2 < launch.cluster_blocks) ++log2;
  return {gate.x,
          gate.x_stride,
          gate.gate,
          gate.gate_stride,
          gate.is_padding,
          gate.topk_ids,
          gate.topk_weights,
          static_cast<int32_t>(gate.num_tokens),
          static_cast<int32_t>(gate.hidden_size),
          static_cast<int32_t>(gate.num_experts),
          static_cast<int32_t>(gate.top_k),
          log2,
          gate_units(gate),
          launch.units_per_block,
          gate_shared(gate, launch, &bytes),
          gate.gate_is_settled};
}

}  // namespace moeopt
