// Grouped GEMM of the experts for middle and large batches: persistent, warp-specialised, weights as the 64-row operand.
//
//   tile = 256 weight rows x 16 .. 160 tokens of one expert; K in steps of 128 bytes of a weight row
//
//   producer warpgroup (threads 0-127)                     2 math warpgroups, 2 x 64 weight rows each
//     w  4 boxes of 64 rows ──TMA, 128-byte swizzle──► A ┐
//     tokens, gathered ──cp.async, swizzled by hand──► B ├─ ring ──full──►  wgmma m64 n{16..160}, FP32 accumulators
//     (scales of FP8 weights and tokens ──cp.async──► S) ┘       ◄─empty──  SwiGLU or nothing, BF16 or (h, FP8) E4M3,
//                                                                           through shared memory ──► h or y rows
//
//   kUp:   rows are 64 gate + the same 64 up of each math warpgroup, so a thread holds gate and up of one element
//   kDown: rows are 128 consecutive rows of w2 per math warpgroup
//
// Token tiles come from the routing kernel's table, so the host never reads a count. Consecutive blocks take the row
// tiles of one token tile; token tiles of one expert are neighbours, so its weights are in L2 for the second.
//
// Modes: BF16 x BF16. FP8 weights x BF16 tokens: weights pass through registers, E4M3 to BF16 on the way, tokens
// permuted by prepare_tokens.cuh. FP8 x FP8: per-128 scales of both sides applied to FP32 partial sums.
//
// Barriers: full opens with 128 + 1 arrivals (every producer thread's copies once they have landed, and thread 0 with the
// TMA byte count); empty with 8 (one per math warp). The producers wait for empty stages only. What cp.async wrote is
// made visible to the tensor cores by the math warps' fence behind their wait.
//
// Programmatic dependent launch: kDown fills its ring with weights before it waits for h.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/grouped_gemm_epilogue.cuh"
#include "moeopt/grouped_gemm_shape.cuh"

namespace moeopt {

// The weights of one stage, by one thread.
template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void copy_weights(const TensorMap* map0, const TensorMap* map1, const GemmRing& ring, int expert,
                                int row_tile, int step) {
  using Shape = GemmShape<kMode, kTokens>;
  uint64_t* full = ring.full + ring.stage;
  mbarrier_arrive_expect_bytes(full, Shape::kWeightBytes);
  MOEOPT_UNROLL
  for (int box = 0; box < Shape::kBoxes; ++box) {
    unsigned char* to = ring.data() + box * kBoxBytes;
    tensor_copy(to, box % 2 ? map1 : map0, step * Shape::kDepth, first_row<kUp>(row_tile, box / 2, box % 2), expert,
                full);
  }
}

// Fills the empty ring with the first task's weights, which no earlier launch writes; returns how many stages. The
// routing is complete: the launch between it and this one waited for it before it let this one start.
template <GemmMode kMode, int kTokens>
MOEOPT_DEVICE int copy_first_weights(const GemmArgs& args, const TensorMap* map, GemmRing ring) {
  using Shape = GemmShape<kMode, kTokens>;
  const int num_row_tiles = row_tiles<false>(args), task = block_index();
  if (task >= load_shared_across_blocks(args.num_tiles) * num_row_tiles) return 0;
  const int num_steps = ceil_div(args.depth, Shape::kDepth);
  const int ahead = num_steps < args.num_stages ? num_steps : args.num_stages;
  if (thread_index() == 0) {
    const TokenTile tile = load_tile(args.tiles + task / num_row_tiles);
    for (int step = 0; step < ahead; ++step) {
      copy_weights<kMode, kTokens, false>(map, map, ring, tile.expert, task % num_row_tiles, step);
      ring.advance();
    }
  }
  return ahead;
}

constexpr uint32_t kNoRow = 0xffffffffu;

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void produce_tiles(const GemmArgs& args, const TensorMap* map0, const TensorMap* map1, GemmRing ring) {
  using Shape = GemmShape<kMode, kTokens>;
  constexpr int kElementBytes = kMode == GemmMode::kFp8 ? 1 : 2;
  constexpr int kRowsPerThread = kTokens / 16;
  const int thread = thread_index(), chunk = thread % 8;
  int ahead = kUp ? 0 : copy_first_weights<kMode, kTokens>(args, map0, ring);
  wait_for_previous_kernel();
  launch_dependents();  // after the wait: see copy_first_weights
  const int num_row_tiles = row_tiles<kUp>(args);
  const int num_tasks = load_shared_across_blocks(args.num_tiles) * num_row_tiles;
  const int num_steps = ceil_div(args.depth, Shape::kDepth), scale_groups = ceil_div(args.depth, 128);
  // A row of tokens starts at a multiple of 16 bytes: 32 bits reach 64 GiB.
  const auto row_vectors = static_cast<uint32_t>(args.token_stride * kElementBytes / 16);
  const auto token_row = [&](int position) {
    return args.sorted_pair != nullptr ? args.sorted_pair[position] / args.top_k : position;
  };
  for (int task = block_index(); task < num_tasks; task += grid_blocks()) {
    const TokenTile tile = load_tile(args.tiles + task / num_row_tiles);
    uint32_t vectors[kRowsPerThread];  // where the rows of this thread start
    MOEOPT_UNROLL
    for (int j = 0; j < kRowsPerThread; ++j) {
      const int n = thread / 8 + 16 * j;
      // A column past the tile's count keeps old bytes: it only reaches sums that are never stored.
      vectors[j] = n < tile.count ? row_vectors * static_cast<uint32_t>(token_row(tile.begin + n)) : kNoRow;
    }
    const float* scale_source = nullptr;
    if (kMode == GemmMode::kFp8 && thread < tile.count) {
      scale_source = args.token_scale + static_cast<int64_t>(token_row(tile.begin + thread)) * scale_groups;
    }
    const float* factor_source = nullptr;
    if (kMode != GemmMode::kBf16 && args.scale_kind == ScaleKind::kBlock128 && thread < kFactors) {
      const int operand = thread / 4 % 2, first = first_row<kUp>(task % num_row_tiles, thread / 8, operand);
      const int inside = first + thread % 4 * 16 < args.rows ? first + thread % 4 * 16 : 0;
      const int row = kUp ? w13_row(args.activation, args.rows, inside, operand) : inside;
      factor_source = block_scales(args.weight_scale, tile.expert, args.weight_rows, args.depth, row);
    }
    for (int step = 0; step < num_steps; ++step) {
      mbarrier_wait(ring.empty + ring.stage, ring.parity ^ 1u);
      unsigned char* stage = ring.data();
      if (ahead > 0) {
        --ahead;
      } else if (thread == 0) {
        copy_weights<kMode, kTokens, kUp>(map0, map1, ring, tile.expert, task % num_row_tiles, step);
      }
      unsigned char* to = stage + Shape::kWeightBytes + thread / 8 * 128 + ((chunk ^ (thread / 8 & 7)) << 4);
      MOEOPT_UNROLL
      for (int half = 0; half < Shape::kTokenTiles; ++half) {
        const int byte = step * Shape::kTokenTiles * 128 + half * 128 + chunk * 16;
        // Past the end of K the weights arrive as zeros, so must the tokens: 0 * NaN is not 0.
        const bool inside = byte < args.depth * kElementBytes;
        const unsigned char* from = static_cast<const unsigned char*>(args.tokens) + (inside ? byte : 0);
        MOEOPT_UNROLL
        for (int j = 0; j < kRowsPerThread; ++j) {
          if (vectors[j] == kNoRow) continue;
          async_copy16(to + half * kTokens * 128 + j * 2048, from + static_cast<uint64_t>(vectors[j]) * 16, inside);
        }
      }
      auto* scales = reinterpret_cast<float*>(stage + Shape::kScaleOffset);
      if (scale_source != nullptr) async_copy4(scales + thread, scale_source + step);
      if (factor_source != nullptr) async_copy4(scales + kFactorOffset + thread, factor_source + step);
      async_copies_arrive(ring.full + ring.stage);
      ring.advance();
    }
  }
}

template <int kRegisters>
MOEOPT_DEVICE void touch_all(float (&values)[kRegisters]) {
  MOEOPT_UNROLL
  for (int r = 0; r < kRegisters; ++r) wgmma_touch(values[r]);
}

// One stage of BF16: 4 steps of K = 16, both operands from shared memory, one group in flight behind.
template <int kColumns>
MOEOPT_DEVICE void multiply_bf16(const unsigned char* stage, int warpgroup, bool first, float (&sum0)[kColumns / 2],
                                 float (&sum1)[kColumns / 2]) {
  const uint64_t a0 = swizzled_descriptor(stage + (2 * warpgroup) * kBoxBytes);
  const uint64_t a1 = swizzled_descriptor(stage + (2 * warpgroup + 1) * kBoxBytes);
  const uint64_t b = swizzled_descriptor(stage + 4 * kBoxBytes);
  wgmma_fence();
  MOEOPT_UNROLL
  for (int k = 0; k < 4; ++k) {
    const int keep = !first || k > 0;
    wgmma_bf16(sum0, advance_descriptor(a0, 32 * k), advance_descriptor(b, 32 * k), keep);
    wgmma_bf16(sum1, advance_descriptor(a1, 32 * k), advance_descriptor(b, 32 * k), keep);
  }
  wgmma_commit();
}

// E4M3 weights of rows g and g + 8 of this warp, K = 16 k + 4 t ..., as BF16 operand registers.
MOEOPT_DEVICE void load_fp8_rows(const unsigned char* box, int k, uint32_t (&registers)[4]) {
  const int lane = thread_index() % 32, row = thread_index() / 32 % 4 * 16 + lane / 4;
  const unsigned char* source = box + row * 128 + ((k ^ (row & 7)) << 4) + lane % 4 * 4;
  const uint32_t low = *reinterpret_cast<const uint32_t*>(source);
  const uint32_t high = *reinterpret_cast<const uint32_t*>(source + 8 * 128);  // row + 8: the same swizzle
  registers[0] = bf16x2_from_e4m3x2(low);
  registers[1] = bf16x2_from_e4m3x2(high);
  registers[2] = bf16x2_from_e4m3x2(low >> 16);
  registers[3] = bf16x2_from_e4m3x2(high >> 16);
}

// One stage of FP8 weights and BF16 tokens, of which `second_half` is the offset of K = 64 and on. Two register sets:
// one is converted while the other is multiplied.
template <int kColumns>
MOEOPT_DEVICE void multiply_fp8_weights(const unsigned char* stage, int warpgroup, int second_half,
                                        float (&part0)[kColumns / 2], float (&part1)[kColumns / 2]) {
  const uint64_t b = swizzled_descriptor(stage + 4 * kBoxBytes);
  uint32_t a0[2][4], a1[2][4];
  MOEOPT_UNROLL
  for (int k = 0; k < 8; ++k) {
    load_fp8_rows(stage + (2 * warpgroup) * kBoxBytes, k, a0[k % 2]);
    load_fp8_rows(stage + (2 * warpgroup + 1) * kBoxBytes, k, a1[k % 2]);
    const uint64_t tokens = advance_descriptor(b, k / 4 * second_half + k % 4 * 32);
    wgmma_fence();
    wgmma_bf16(part0, a0[k % 2], tokens, k > 0);
    wgmma_bf16(part1, a1[k % 2], tokens, k > 0);
    wgmma_commit();
    wgmma_wait<1>();  // the group before is done: its registers may be written again
  }
  wgmma_wait<0>();
}

// One stage of FP8 x FP8, one operand: 4 steps of K = 32. Not waited for.
template <int kColumns>
MOEOPT_DEVICE void multiply_fp8(const unsigned char* stage, int box, float (&part)[kColumns / 2]) {
  const uint64_t a = swizzled_descriptor(stage + box * kBoxBytes);
  const uint64_t b = swizzled_descriptor(stage + 4 * kBoxBytes);
  wgmma_fence();
  MOEOPT_UNROLL
  for (int k = 0; k < 4; ++k) wgmma_e4m3(part, advance_descriptor(a, 32 * k), advance_descriptor(b, 32 * k), k > 0);
  wgmma_commit();
}

// The scales of two neighbouring columns.
struct alignas(8) ScalePair {
  float first, second;
};

// `factor`: of the warp's 16 rows. `token_scale`: of the tile's columns, or null.
template <int kColumns>
MOEOPT_DEVICE void add_scaled(float (&sum)[kColumns / 2], float (&part)[kColumns / 2], float factor,
                              const ScalePair* token_scale) {
  touch_all(part);
  MOEOPT_UNROLL
  for (int j = 0; j < kColumns / 8; ++j) {
    ScalePair scale = {factor, factor};
    if (token_scale != nullptr) {
      const ScalePair of_tokens = token_scale[j * 4 + thread_index() % 4];
      scale = {factor * of_tokens.first, factor * of_tokens.second};
    }
    sum[4 * j] += scale.first * part[4 * j];
    sum[4 * j + 1] += scale.second * part[4 * j + 1];
    sum[4 * j + 2] += scale.first * part[4 * j + 2];
    sum[4 * j + 3] += scale.second * part[4 * j + 3];
  }
}

// One tile by one math warpgroup: its part of the ring, then the epilogue. kColumns: of the kTokens that the stage has
// room for, those that are multiplied.
template <GemmMode kMode, int kTokens, int kColumns, bool kUp>
MOEOPT_DEVICE void multiply_tile(const GemmArgs& args, const TokenTile& tile, int row_tile, GemmRing& ring,
                                 const Staging& staging) {
  using Shape = GemmShape<kMode, kTokens>;
  const int warpgroup = staging.warpgroup, lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  const int thread_row = thread_index() / 32 % 4 * 16 + lane / 4;
  const int num_steps = ceil_div(args.depth, Shape::kDepth);
  const int first0 = first_row<kUp>(row_tile, warpgroup, 0);
  const int first1 = first_row<kUp>(row_tile, warpgroup, 1);
  const auto release = [&](int stage) {
    if (lane == 0) mbarrier_arrive(ring.empty + stage);
  };
  // Rows of the weight matrix behind operand 0 and 1 of this thread; -1 past the end.
  int rows0[2], rows1[2];
  MOEOPT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i0 = first0 + thread_row + 8 * half, i1 = first1 + thread_row + 8 * half;
    rows0[half] = i0 >= args.rows ? -1 : kUp ? w13_row(args.activation, args.rows, i0, 0) : i0;
    rows1[half] = i1 >= args.rows ? -1 : kUp ? w13_row(args.activation, args.rows, i1, 1) : i1;
  }
  const bool has_factors = kMode != GemmMode::kBf16 && args.scale_kind == ScaleKind::kBlock128;
  float sum0[kColumns / 2] = {}, sum1[kColumns / 2] = {};
  int previous = -1;
  for (int step = 0; step < num_steps; ++step) {
    mbarrier_wait(ring.full + ring.stage, ring.parity);
    fence_async_proxy();
    const unsigned char* stage = ring.data();
    float factor0 = 1.0f, factor1 = 1.0f;
    if (has_factors) {
      const auto* factors = reinterpret_cast<const float*>(stage + Shape::kScaleOffset) + kFactorOffset;
      factor0 = factors[8 * warpgroup + warp];
      factor1 = factors[8 * warpgroup + 4 + warp];
    }
    if constexpr (kMode == GemmMode::kBf16) {
      multiply_bf16<kColumns>(stage, warpgroup, step == 0, sum0, sum1);
      wgmma_wait<1>();
      if (previous >= 0) release(previous);
      previous = ring.stage;
    } else if constexpr (kMode == GemmMode::kFp8Weights) {
      float part0[kColumns / 2], part1[kColumns / 2];
      multiply_fp8_weights<kColumns>(stage, warpgroup, kTokens * 128, part0, part1);
      add_scaled<kColumns>(sum0, part0, factor0, nullptr);
      add_scaled<kColumns>(sum1, part1, factor1, nullptr);
      sync_warp();
      release(ring.stage);
    } else if constexpr (kColumns <= 64) {  // the second operand is multiplied while the first is added
      const auto* token_scale = reinterpret_cast<const ScalePair*>(stage + Shape::kScaleOffset);
      float part0[kColumns / 2], part1[kColumns / 2];
      multiply_fp8<kColumns>(stage, 2 * warpgroup, part0);
      multiply_fp8<kColumns>(stage, 2 * warpgroup + 1, part1);
      wgmma_wait<1>();
      add_scaled<kColumns>(sum0, part0, factor0, token_scale);
      wgmma_wait<0>();
      add_scaled<kColumns>(sum1, part1, factor1, token_scale);
      sync_warp();  // all lanes have read the scales
      release(ring.stage);
    } else {
      const auto* token_scale = reinterpret_cast<const ScalePair*>(stage + Shape::kScaleOffset);
      float part[kColumns / 2];
      multiply_fp8<kColumns>(stage, 2 * warpgroup, part);
      wgmma_wait<0>();
      add_scaled<kColumns>(sum0, part, factor0, token_scale);
      multiply_fp8<kColumns>(stage, 2 * warpgroup + 1, part);
      wgmma_wait<0>();
      add_scaled<kColumns>(sum1, part, factor1, token_scale);
      sync_warp();  // all lanes have read the scales
      release(ring.stage);
    }
    ring.advance();
  }
  if constexpr (kMode == GemmMode::kBf16) {
    wgmma_wait<0>();
    release(previous);
  }
  touch_all(sum0);
  touch_all(sum1);
  const RowTerms terms0 = row_terms(args, tile.expert, rows0), terms1 = row_terms(args, tile.expert, rows1);
  const auto value0 = [&](int r) { return sum0[r] * terms0.scale[r % 4 / 2] + terms0.bias[r % 4 / 2]; };
  const auto value1 = [&](int r) { return sum1[r] * terms1.scale[r % 4 / 2] + terms1.bias[r % 4 / 2]; };
  constexpr int kStaged = Shape::kStagedTokens;
  if constexpr (kUp) {
    constexpr bool kQuantize = kMode == GemmMode::kFp8;
    if (args.activation == Activation::kSilu) {  // once, not per value
      store_tile<kColumns, kStaged, kQuantize>(args, tile, first0, args.permute_out, staging, [&](int r) {
        return swiglu(Activation::kSilu, value0(r), value1(r));
      });
    } else {
      store_tile<kColumns, kStaged, kQuantize>(args, tile, first0, args.permute_out, staging, [&](int r) {
        return swiglu(Activation::kSwigluOai, value0(r), value1(r));
      });
    }
  } else {
    store_tile<kColumns, kStaged, false>(args, tile, first0, false, staging, value0);
    store_tile<kColumns, kStaged, false>(args, tile, first1, false, staging, value1);
  }
}

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void multiply_tiles(const GemmArgs& args, GemmRing ring, const Staging& staging) {
  wait_for_previous_kernel();
  const int num_row_tiles = row_tiles<kUp>(args);
  const int num_tasks = load_shared_across_blocks(args.num_tiles) * num_row_tiles;
  for (int task = block_index(); task < num_tasks; task += grid_blocks()) {
    const TokenTile tile = load_tile(args.tiles + task / num_row_tiles);
    const int row_tile = task % num_row_tiles;
    // An expert's last tile is often half empty: half the columns, half the arithmetic. Only where that is the bound.
    if constexpr (kTokens >= 64) {
      if (tile.count <= kTokens / 2) {
        multiply_tile<kMode, kTokens, kTokens / 2, kUp>(args, tile, row_tile, ring, staging);
        continue;
      }
    }
    multiply_tile<kMode, kTokens, kTokens, kUp>(args, tile, row_tile, ring, staging);
  }
}

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kGemmThreads, 1)
    grouped_gemm_kernel(const MOEOPT_GRID_CONSTANT TensorMap map0, const MOEOPT_GRID_CONSTANT TensorMap map1,
                        const MOEOPT_GRID_CONSTANT GemmArgs args) {
  using Shape = GemmShape<kMode, kTokens>;
  MOEOPT_SHARED_BASE(shared);
  unsigned char* after_ring = shared + args.num_stages * Shape::kStageBytes;
  auto* barriers = reinterpret_cast<uint64_t*>(after_ring + 2 * Shape::kStagingBytes);
  if (thread_index() == 0) {
    prefetch_tensor_map(&map0);
    prefetch_tensor_map(&map1);
    for (int s = 0; s < args.num_stages; ++s) {
      mbarrier_init(barriers + s, kProducerThreads + 1);
      mbarrier_init(barriers + args.num_stages + s, (kGemmThreads - kProducerThreads) / 32);
    }
    fence_mbarrier_init();
  }
  sync_block();
  const GemmRing ring(shared, barriers, args.num_stages, Shape::kStageBytes);
  if (thread_index() < kProducerThreads) {
    give_registers_back<kProducerRegisters>();
    produce_tiles<kMode, kTokens, kUp>(args, &map0, &map1, ring);
  } else {
    take_registers<kMathRegisters>();
    const Staging staging = {after_ring, uniform(thread_index() / 128) - 1, Shape::kStagingBytes, Shape::kStagedTokens};
    multiply_tiles<kMode, kTokens, kUp>(args, ring, staging);
  }
}

}  // namespace moeopt
