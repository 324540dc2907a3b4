// The gate product and the top-k of few tokens in one launch: x and the gate's weights to expert ids and weights.
//
//   a cluster of up to 16 blocks, each with some of the experts (units of 8) over all of H
//     gate rows ──► A registers of mma (rows: experts), tokens ──► B (columns) ──► sums of 8 warps, each an eighth of H
//     sum of the warps in fixed order ──► BF16, as torch rounds logits ──► 16 bytes (a unit of a token) by st.async
//   token t belongs to block t % cluster: one of its warps waits for all units and routes the token (router.cuh)
//
// The logits cross in shared memory: no counter, no trip through L2, no second launch. One wave of loads covers the
// gate of Qwen3-30B-A3B, and it may be in flight while the previous kernel still drains (`gate_is_settled`).
//
// The launch before may still write x (and a gate that is not settled) when this one has started, so both are read from
// L2: nothing promises that a read-only load does not find an older line in L1.
//
// A lane reads 16 bytes of a row (lane t of a quad: bytes 16t of every 64) and the tokens likewise, as
// direct_experts.cuh does: both operands have the same permutation of H.
#pragma once

#include "moeopt/router.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kGateWarps = 8;
constexpr int kGateUnit = 8;     // experts: half the rows of a product, and 16 bytes of BF16 logits
constexpr int kGateColumns = 8;  // tokens of a product
constexpr int kGatePieces = 8;   // of 64 bytes of a row, that a warp loads at once
constexpr int kGateTokens = 32;  // at most: every block reads all tokens, in 1.2 us for 32 of H = 2048
constexpr int kGateBlocks =
    16;  // of a cluster at most; more than 8 need cudaFuncAttributeNonPortableClusterSizeAllowed
constexpr int kGateBarrierBytes = 16;  // at the base of a block's shared memory

// Where the parts of a block's dynamic shared memory begin, in bytes; the same in every block of the cluster.
struct GateShared {
  int32_t logits;    // [slot][unit] of 16 bytes: of the tokens that the block routes
  int32_t outgoing;  // [unit of the block][token] of 16 bytes
  int32_t partial;   // [warp][unit of the block][group of tokens][expert][token] in FP32
  int32_t scratch;   // [warp that routes]: scores, keys
};

struct GateTopkArgs {
  const uint16_t* x;          // BF16 [T, H]
  int64_t x_stride;           // elements between tokens
  const uint16_t* gate;       // BF16 [E, H]
  int64_t gate_stride;        // elements between experts
  const uint8_t* is_padding;  // [T], or null: tokens that go to no expert: their ids are -1, their weights 0
  int* topk_ids;              // out, contiguous [T, k], best first
  float* topk_weights;        // out, likewise
  int32_t num_tokens, hidden_size, num_experts, top_k;
  int32_t cluster_log2, units, units_per_block;  // units: of kGateUnit experts
  GateShared shared;
  bool gate_is_settled;  // the launch before this one does not write the gate: it is read before that one has ended
};

// --- product -----------------------------------------------------------------------------------------------------

// 16 bytes per lane of some pieces of the rows of one product; zeros past the end.
template <int kHalves>
struct GateRows {
  Vec4 part[kGatePieces][kHalves];
};

// What a warp reads: its share of every row, in steps of kGatePieces pieces, product after product; all of it again for
// every 8 kGroups tokens (a pass). A step knows its place: a division would delay the first load.
struct GateStep {
  int first_piece, end_piece, products, passes;
  int piece, product = 0, pass = 0;

  MOEOPT_DEVICE GateStep(int row_bytes, int num_products, int num_passes) {
    const int pieces = ceil_div(row_bytes, 64), share = ceil_div(pieces, kGateWarps);
    first_piece = thread_index() / 32 * share;
    end_piece = first_piece + share;  // past the row for the last warps
    products = num_products;
    passes = num_passes;
    piece = first_piece;
  }
  MOEOPT_DEVICE bool exists() const { return product < products && pass < passes; }
  MOEOPT_DEVICE bool ends_product() const { return piece + kGatePieces >= end_piece; }
  MOEOPT_DEVICE void advance() {
    piece += kGatePieces;
    if (piece < end_piece) return;
    piece = first_piece;
    if (++product < products) return;
    product = 0;
    ++pass;
  }
  // Byte of a row at which this lane's part of the step's piece i begins, and whether it is this warp's.
  MOEOPT_DEVICE int byte(int i) const { return (piece + i) * 64 + thread_index() % 4 * 16; }
  MOEOPT_DEVICE bool has(int i, int hidden) const { return piece + i < end_piece && byte(i) < hidden * 2; }
};

template <int kHalves>
MOEOPT_DEVICE void load_gate(const GateTopkArgs& args, const GateStep& step, int first_unit, int end_unit,
                             GateRows<kHalves>& rows) {
  MOEOPT_UNROLL
  for (int half = 0; half < kHalves; ++half) {
    const int unit = first_unit + step.product * kHalves + half;
    const int expert = unit * kGateUnit + thread_index() % 32 / 4;
    const bool inside = unit < end_unit && expert < args.num_experts;
    const auto* row = reinterpret_cast<const unsigned char*>(args.gate + (inside ? expert : 0) * args.gate_stride);
    MOEOPT_UNROLL
    for (int i = 0; i < kGatePieces; ++i) {
      rows.part[i][half] = Vec4{0, 0, 0, 0};
      if (inside && step.has(i, args.hidden_size)) rows.part[i][half] = ld_global_cg_v4(row + step.byte(i));
    }
  }
}

// sums += rows of a step x the 8 kGroups tokens of its pass.
template <int kHalves, int kGroups>
MOEOPT_DEVICE void multiply_gate(const GateTopkArgs& args, const GateStep& step, const GateRows<kHalves>& rows,
                                 float (&sums)[kGroups][4]) {
  Vec4 tokens[kGroups][kGatePieces];
  MOEOPT_UNROLL
  for (int group = 0; group < kGroups; ++group) {
    const int token = (step.pass * kGroups + group) * kGateColumns + thread_index() % 32 / 4;
    const bool inside = token < args.num_tokens;
    const auto* row = reinterpret_cast<const unsigned char*>(args.x + (inside ? token : 0) * args.x_stride);
    MOEOPT_UNROLL
    for (int i = 0; i < kGatePieces; ++i) {
      tokens[group][i] = Vec4{0, 0, 0, 0};
      if (inside && step.has(i, args.hidden_size)) tokens[group][i] = ld_global_cg_v4(row + step.byte(i));
    }
  }
  MOEOPT_UNROLL
  for (int group = 0; group < kGroups; ++group) {
    MOEOPT_UNROLL
    for (int i = 0; i < kGatePieces; ++i) {
      const Vec4 low = rows.part[i][0], x = tokens[group][i];
      const Vec4 high = kHalves == 2 ? rows.part[i][kHalves - 1] : Vec4{0, 0, 0, 0};
      mma_m16n8k16(sums[group], low.x, high.x, low.y, high.y, x.x, x.y);
      mma_m16n8k16(sums[group], low.z, high.z, low.w, high.w, x.z, x.w);
    }
  }
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

// kHalves: units that a product multiplies, 1 where a block has one only. kGroups: of 8 tokens, multiplied together.
template <int kHalves, int kGroups>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kGateWarps * 32, 1)
    gate_topk_kernel(const MOEOPT_GRID_CONSTANT GateTopkArgs args, const MOEOPT_GRID_CONSTANT RouterArgs router) {
  MOEOPT_SHARED_BASE(shared);
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32, rank = cluster_ctarank();
  const int num_tokens = args.num_tokens, blocks = 1 << args.cluster_log2, units = args.units;
  const int first_unit = rank * args.units_per_block;
  const int end_unit = first_unit + args.units_per_block < units ? first_unit + args.units_per_block : units;
  const int slots = (num_tokens - rank + blocks - 1) >> args.cluster_log2;  // tokens that this block routes
  const GateShared at = args.shared;
  uint64_t* const arrived = reinterpret_cast<uint64_t*>(shared);
  if (thread == 0 && slots > 0) mbarrier_init(arrived, static_cast<uint32_t>(slots * units));
  fence_mbarrier_init();
  barrier_cluster_arrive_relaxed();

  if (!args.gate_is_settled) griddepcontrol_wait();
  const int products = first_unit < end_unit ? ceil_div(end_unit - first_unit, kHalves) : 0;
  const int passes = ceil_div(num_tokens, kGateColumns * kGroups), groups = passes * kGroups;  // groups of 8 tokens
  GateStep step(args.hidden_size * 2, products, passes);
  GateRows<kHalves> rows;
  if (step.exists()) load_gate(args, step, first_unit, end_unit, rows);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // after the wait: the experts' second launch may read the ids at once

  float* const partial = reinterpret_cast<float*>(shared + at.partial);
  constexpr int kFragment = kGateUnit * kGateColumns;
  float sums[kGroups][4] = {};
  while (step.exists()) {
    GateStep following = step;
    following.advance();
    GateRows<kHalves> next;
    const bool more = following.exists();
    if (more) load_gate(args, following, first_unit, end_unit, next);
    multiply_gate(args, step, rows, sums);
    if (step.ends_product()) {
      MOEOPT_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        MOEOPT_UNROLL
        for (int half = 0; half < kHalves; ++half) {
          const int unit = step.product * kHalves + half, at_group = step.pass * kGroups + group;  // unit of this block
          if (first_unit + unit < end_unit) {
            float* to = partial + ((warp * args.units_per_block + unit) * groups + at_group) * kFragment;
            to += lane / 4 * kGateColumns + lane % 4 * 2;
            to[0] = sums[group][2 * half];
            to[1] = sums[group][2 * half + 1];
          }
        }
        MOEOPT_UNROLL
        for (int r = 0; r < 4; ++r) sums[group][r] = 0.0f;
      }
    }
    if (more) rows = next;
    step = following;
  }
  bar_sync();
  barrier_cluster_wait();  // the barriers of all blocks are made

  // Eight lanes sum the experts of a unit for one token; the first of them sends the unit to the token's block.
  uint16_t* const logits = static_cast<uint16_t*>(const_cast<void*>(router.logits));  // out, contiguous [T, E]
  for (int unit = 0; unit < end_unit - first_unit; ++unit) {
    for (int begin = warp * 32; begin < num_tokens * kGateUnit; begin += kGateWarps * 32) {
      const int i = begin + lane, expert = i % kGateUnit, token = i / kGateUnit;
      const bool inside = token < num_tokens;
      auto* const outgoing = reinterpret_cast<uint16_t*>(shared + at.outgoing + (unit * num_tokens + token) * 16);
      if (inside) {
        const float* from = partial + (unit * groups + token / kGateColumns) * kFragment + expert * kGateColumns;
        float sum = 0;
        MOEOPT_UNROLL
        for (int w = 0; w < kGateWarps; ++w) {
          sum += from[w * args.units_per_block * groups * kFragment + token % kGateColumns];
        }
        const auto logit = static_cast<uint16_t>(cvt_bf16x2_f32(sum, 0.0f));
        outgoing[expert] = logit;
        const int of_all = (first_unit + unit) * kGateUnit + expert;
        if (of_all < args.num_experts) logits[token * args.num_experts + of_all] = logit;
      }
      bar_warp_sync();
      if (inside && expert == 0) {
        unsigned char* const to = shared + at.logits + ((token >> args.cluster_log2) * units + first_unit + unit) * 16;
        st_async_v4(to, arrived, token & (blocks - 1), *reinterpret_cast<const Vec4*>(outgoing));
      }
    }
  }

  if (warp >= slots) return;
  mbarrier_wait_parity(arrived, 0);
  float* const scores = reinterpret_cast<float*>(shared + at.scratch) + warp * 2 * units * kGateUnit;
  uint32_t* const keys = reinterpret_cast<uint32_t*>(scores + units * kGateUnit);
  for (int slot = warp; slot < slots; slot += kGateWarps) {
    const int64_t token = (static_cast<int64_t>(slot) << args.cluster_log2) + rank;
    if (args.is_padding != nullptr && args.is_padding[token]) {
      if (lane < args.top_k) {
        args.topk_ids[token * args.top_k + lane] = -1;
        args.topk_weights[token * args.top_k + lane] = 0.0f;
      }
      continue;
    }
    route_gated_token(router, shared + at.logits + slot * units * 16, args.num_experts, args.top_k, scores, keys, lane,
                      args.topk_ids + token * args.top_k, args.topk_weights + token * args.top_k);
  }
}

}  // namespace moeopt
