// The gate product and the top-k of few tokens in one launch: x and the gate's weights to expert ids and weights.
//
//   a block has one expert, a warp of it one token
//     row of the gate and token ──► products in FP32, summed by the warp in fixed order ──► BF16, as torch rounds
//     logits ──► logits[T, E], and a word of args.arrived: "is there" above the 16 bits of the logit
//   token t: the warp that has it in block t % blocks reads the token's words until all are there, makes them zero
//     again and routes the token (router.cuh)
//
// A word carries its own flag, so no fence and no counter stands between a product and the choice: what is waited for
// is one store and one load through L2. No block waits before it has made its own words, so blocks that find no room
// yet find it later.
#pragma once

#include "moeopt/gate_topk.h"
#include "moeopt/router.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kGateTokens = 8;  // at most: a warp each
constexpr int kGatePieces = 8;  // of 16 bytes per lane, that are loaded at once: 2048 of H
constexpr int kGatePolled = 8;  // words per lane that are asked for at once
constexpr uint32_t kGateArrived = 0x10000u;
constexpr int kGateScratchPerExpert = 12;  // bytes of shared memory: score, key, logit

// --- product -----------------------------------------------------------------------------------------------------

// 16 bytes per lane of kGatePieces pieces of a row from `column` on; zeros past the end.
MOEOPT_DEVICE void load_gate_pieces(const uint16_t* row, int column, int hidden, Vec4 (&pieces)[kGatePieces]) {
  MOEOPT_UNROLL
  for (int i = 0; i < kGatePieces; ++i) {
    const int at = column + (i * 32 + thread_index() % 32) * 8;
    pieces[i] = at < hidden ? *reinterpret_cast<const Vec4*>(row + at) : Vec4{0, 0, 0, 0};
  }
}

MOEOPT_DEVICE void multiply_gate_pair(uint32_t weights, uint32_t x, float& sum) {
  sum += float_from_bits(weights << 16) * float_from_bits(x << 16);
  sum += float_from_bits(weights & 0xffff0000u) * float_from_bits(x & 0xffff0000u);
}

// --- top-k -------------------------------------------------------------------------------------------------------

// What route_token does for the softmax of BF16 logits without bias and groups, of at most 32 kKeys experts, by one
// warp in registers. A key is the logit, in the order of the floats, above the complement of the expert: no two are
// equal, the lower expert wins a tie, and one instruction finds winner and expert. Softmax keeps the order of the
// logits.
MOEOPT_DEVICE uint32_t gate_key(uint32_t logit, int expert) {
  if ((logit & 0x7fffu) > 0x7f80u) logit = 0x7fffu;  // NaN above all
  if (logit == 0x8000u) logit = 0;                   // both zeros are equal
  const uint32_t ordered = (logit & 0x8000u) ? ~logit & 0xffffu : logit | 0x8000u;
  return ordered << 16 | (0xffffu - static_cast<uint32_t>(expert));  // 0 is below every key: no expert
}
MOEOPT_DEVICE int expert_of_gate_key(uint32_t key) { return static_cast<int>(0xffffu - (key & 0xffffu)); }
MOEOPT_DEVICE float logit_of_gate_key(uint32_t key) {
  const uint32_t ordered = key >> 16;
  return float_from_bits(((ordered & 0x8000u) ? ordered & 0x7fffu : ~ordered & 0xffffu) << 16);
}

template <int kKeys>
MOEOPT_DEVICE void route_token_in_registers(const RouterArgs& router, const uint16_t* logits, int num_experts,
                                            int top_k, int lane, int* expert_ids, float* weights) {
  uint32_t keys[kKeys];
  MOEOPT_UNROLL
  for (int i = 0; i < kKeys; ++i) {
    const int expert = lane + 32 * i;
    keys[i] = expert < num_experts ? gate_key(logits[expert], expert) : 0;
  }
  MOEOPT_UNROLL
  for (int last = kKeys - 1; last > 0; --last) {  // largest first
    MOEOPT_UNROLL
    for (int i = 0; i < last; ++i) {
      const uint32_t a = keys[i], b = keys[i + 1];
      keys[i] = a > b ? a : b;
      keys[i + 1] = a > b ? b : a;
    }
  }
  float top = 0, of_all = 0;
  if (!router.renormalize) {
    top = logit_of_gate_key(redux_max(keys[0]));
    MOEOPT_UNROLL
    for (int i = 0; i < kKeys; ++i) of_all += keys[i] != 0 ? exp_f32(logit_of_gate_key(keys[i]) - top) : 0.0f;
    of_all = warp_sum(of_all);
  }
  uint32_t mine = 0;
  for (int round = 0; round < top_k; ++round) {
    const uint32_t best = redux_max(keys[0]);
    if (round == 0) top = logit_of_gate_key(best);
    if (lane == round) mine = best;
    if (keys[0] == best) {
      MOEOPT_UNROLL
      for (int i = 0; i + 1 < kKeys; ++i) keys[i] = keys[i + 1];
      keys[kKeys - 1] = 0;
    }
  }
  const float score = lane < top_k ? exp_f32(logit_of_gate_key(mine) - top) : 0.0f;
  const float sum = router.renormalize ? warp_sum(score) : of_all;
  if (lane < top_k) {
    expert_ids[lane] = expert_of_gate_key(mine);
    weights[lane] = score / sum * router.scaling_factor;
  }
}

// One warp; `scores` and `keys`: its scratch, `num_experts` each.
MOEOPT_DEVICE void route_gated_token(const RouterArgs& router, const void* logits, int num_experts, int top_k,
                                     float* scores, uint32_t* keys, int lane, int* expert_ids, float* weights) {
  const auto* values = static_cast<const uint16_t*>(logits);
  if (router.scoring == Scoring::kSoftmax && router.bias == nullptr && router.num_groups == 1 && num_experts <= 256) {
    if (num_experts <= 128) {
      return route_token_in_registers<4>(router, values, num_experts, top_k, lane, expert_ids, weights);
    }
    return route_token_in_registers<8>(router, values, num_experts, top_k, lane, expert_ids, weights);
  }
  RouterArgs of_token = router;
  of_token.logits = logits;
  of_token.logits_are_bf16 = true;
  route_token(of_token, num_experts, top_k, 0, scores, keys, lane, expert_ids, weights);
}

// --- both --------------------------------------------------------------------------------------------------------

// Copies the logits of a token once all are there.
MOEOPT_DEVICE void collect_logits(uint32_t* arrived, int num_experts, int lane, uint16_t* logits) {
  for (int first = lane; first < num_experts; first += 32 * kGatePolled) {
    uint32_t words[kGatePolled], all;
    do {
      all = kGateArrived;
      MOEOPT_UNROLL
      for (int i = 0; i < kGatePolled; ++i) {
        words[i] = first + 32 * i < num_experts ? ld_relaxed(arrived + first + 32 * i) : kGateArrived;
        all &= words[i];
      }
    } while (all == 0);
    MOEOPT_UNROLL
    for (int i = 0; i < kGatePolled; ++i) {
      const int expert = first + 32 * i;
      if (expert < num_experts) {
        logits[expert] = static_cast<uint16_t>(words[i]);
        arrived[expert] = 0;
      }
    }
  }
  bar_warp_sync();
}

// A block per expert, a warp per token.
MOEOPT_PLAIN_KERNEL void MOEOPT_BOUNDS(kGateTokens * 32, 1)
    gate_topk_kernel(const MOEOPT_GRID_CONSTANT GateTopkArgs args, const MOEOPT_GRID_CONSTANT RouterArgs router) {
  MOEOPT_SHARED_BASE(shared);
  const int token = thread_index() / 32, lane = thread_index() % 32, expert = block_index();
  const int hidden = static_cast<int>(args.hidden_size), num_experts = static_cast<int>(args.num_experts);
  const int top_k = static_cast<int>(args.top_k);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // after the wait: the experts' second launch may read the ids at once

  float sums[4] = {};
  for (int column = 0; column < hidden; column += kGatePieces * 256) {
    Vec4 weights[kGatePieces], values[kGatePieces];
    load_gate_pieces(args.gate + expert * args.gate_stride, column, hidden, weights);
    load_gate_pieces(args.x + token * args.x_stride, column, hidden, values);
    MOEOPT_UNROLL
    for (int i = 0; i < kGatePieces; ++i) {
      multiply_gate_pair(weights[i].x, values[i].x, sums[0]);
      multiply_gate_pair(weights[i].y, values[i].y, sums[1]);
      multiply_gate_pair(weights[i].z, values[i].z, sums[2]);
      multiply_gate_pair(weights[i].w, values[i].w, sums[3]);
    }
  }
  const uint32_t logit = cvt_bf16x2_f32(warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3])), 0.0f);
  uint32_t* const arrived = args.arrived + token * num_experts;
  if (lane == 0) {
    st_relaxed(arrived + expert, kGateArrived | logit);
    uint16_t* const logits = static_cast<uint16_t*>(const_cast<void*>(router.logits));  // out, contiguous [T, E]
    logits[token * num_experts + expert] = static_cast<uint16_t>(logit);
  }

  if (token % grid_blocks() != block_index()) return;
  float* const scores = reinterpret_cast<float*>(shared + token / grid_blocks() * num_experts * kGateScratchPerExpert);
  uint32_t* const keys = reinterpret_cast<uint32_t*>(scores + num_experts);
  uint16_t* const of_token = reinterpret_cast<uint16_t*>(keys + num_experts);
  collect_logits(arrived, num_experts, lane, of_token);
  int* const ids = args.topk_ids + token * top_k;
  float* const topk_weights = args.topk_weights + token * top_k;
  if (args.is_padding == nullptr || !args.is_padding[token]) {
    route_gated_token(router, of_token, num_experts, top_k, scores, keys, lane, ids, topk_weights);
  } else if (lane < top_k) {
    ids[lane] = -1;
    topk_weights[lane] = 0.0f;
  }
}

}  // namespace moeopt
