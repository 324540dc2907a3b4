// One call of the gate product and top-k of few tokens (gate_topk.cuh), which Python fills by field names.
#pragma once

#include <cstdint>

#include "moeopt/fields.h"
#include "moeopt/router.h"

namespace moeopt {

struct GateTopkArgs {
  const uint16_t* x;          // BF16 [T, H]
  int64_t x_stride;           // elements between tokens
  const uint16_t* gate;       // BF16 [E, H]
  int64_t gate_stride;        // elements between experts
  const uint8_t* is_padding;  // [T], or null: tokens that go to no expert: their ids are -1, their weights 0
  int* topk_ids;              // out, contiguous [T, k], best first
  float* topk_weights;        // out, likewise
  uint32_t* arrived;          // [T, E], zero between launches; of one stream
  int64_t num_tokens, hidden_size, num_experts, top_k;

  MOEOPT_FIELDS(x, x_stride, gate, gate_stride, is_padding, topk_ids, topk_weights, arrived, num_tokens, hidden_size,
                num_experts, top_k)
};

struct GateTopkLaunch {
  int32_t blocks, threads, shared_bytes;

  MOEOPT_FIELDS(blocks, threads, shared_bytes)
};

}  // namespace moeopt
