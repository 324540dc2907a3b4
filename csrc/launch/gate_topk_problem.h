// What one call of the gate product and top-k takes, which Python fills by field names, and what gate_topk.h makes of
// it. Nothing of CUDA is in here.
#pragma once

#include <cstdint>

#include "moeopt/fields.h"
#include "moeopt/router.h"

namespace moeopt {

// The fields are those of GateTopkArgs; the logits go where RouterArgs says, as BF16.
struct GateTopkProblem {
  const uint16_t* x;
  int64_t x_stride;
  const uint16_t* gate;
  int64_t gate_stride;
  const uint8_t* is_padding;
  int* topk_ids;
  float* topk_weights;
  int64_t num_tokens, hidden_size, num_experts, top_k;
  int64_t cluster_blocks;  // 0: as many as there are units of experts
  bool gate_is_settled;

  MOEOPT_FIELDS(x, x_stride, gate, gate_stride, is_padding, topk_ids, topk_weights, num_tokens, hidden_size,
                num_experts, top_k, cluster_blocks, gate_is_settled)
};

struct GateTopkLaunch {
  int32_t cluster_blocks, units_per_block;
  int32_t halves, token_groups;  // the kernel's template arguments
  int32_t shared_bytes;

  MOEOPT_FIELDS(cluster_blocks, units_per_block, halves, token_groups, shared_bytes)
};

}  // namespace moeopt
