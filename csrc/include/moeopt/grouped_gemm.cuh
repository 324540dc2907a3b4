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
// In pairs (args.paired; clusters of two blocks): the blocks take two token tiles of one expert and the same weight
// rows, and each asks for two of the four boxes, for both. A third less is read from L2, which is what bounds BF16.
//
//   block 0  boxes 0, 1 ──TMA, multicast──┬──► A of block 0 ──► its tokens          empty[stage] of either block opens
//   block 1  boxes 2, 3 ──TMA, multicast──┴──► A of block 1 ──► its tokens          after the math warps of both
//
// Modes: BF16 x BF16. FP8 weights x BF16 tokens: weights pass through registers, E4M3 to BF16 on the way, tokens
// permuted by prepare_tokens.cuh. FP8 x FP8: scales of the weights, and of h, applied to FP32 partial sums per 128 of
// K; x has one scale per token, applied to the sums (grouped_gemm_products.cuh).
//
// Barriers: full opens with 128 + 1 arrivals (every producer thread's copies once they have landed, and thread 0 with
// the TMA byte count); empty with 8 (one per math warp), in pairs 16. The producers wait for empty stages only. What
// cp.async wrote is made visible to the tensor cores by the math warps' fence behind their wait. A pair's copies may
// land before this block expects their bytes: the phase stays open, for want of the arrival that expects them.
//
// Programmatic dependent launch: kDown fills its ring with weights before it waits for h.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/grouped_gemm_epilogue.cuh"
#include "moeopt/grouped_gemm_products.cuh"
#include "moeopt/grouped_gemm_shape.cuh"

namespace moeopt {

// The weights of one stage, by one thread.
template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void copy_weights(const GemmArgs& args, const TensorMap* map0, const TensorMap* map1,
                                const GemmRing& ring, int expert, int row_tile, int step) {
  using Shape = GemmShape<kMode, kTokens>;
  uint64_t* full = ring.full + ring.stage;
  mbarrier_arrive_expect_bytes(full, Shape::kWeightBytes);
  MOEOPT_UNROLL
  for (int box = 0; box < Shape::kBoxes; ++box) {
    unsigned char* to = ring.data() + box * kBoxBytes;
    const TensorMap* map = box % 2 ? map1 : map0;
    const int row = first_row<kUp>(row_tile, box / 2, box % 2);
    if (!args.paired) {
      tensor_copy(to, map, step * Shape::kDepth, row, expert, full);
    } else if (box / 2 == cluster_rank()) {
      tensor_copy_to_both(to, map, step * Shape::kDepth, row, expert, full);
    }
  }
}

// Fills the empty ring with the first task's weights, which no earlier launch writes; returns how many stages. The
// routing is complete: the launch between it and this one waited for it before it let this one start.
template <GemmMode kMode, int kTokens>
MOEOPT_DEVICE int copy_first_weights(const GemmArgs& args, const TensorMap* map, GemmRing ring) {
  using Shape = GemmShape<kMode, kTokens>;
  const GemmTasks<false> tasks(args);
  if (tasks.first() >= tasks.count) return 0;
  const int num_steps = ceil_div(args.depth, Shape::kDepth);
  const int ahead = num_steps < args.num_stages ? num_steps : args.num_stages;
  if (thread_index() == 0) {
    const int expert = tasks.tile(tasks.first()).expert;
    for (int step = 0; step < ahead; ++step) {
      copy_weights<kMode, kTokens, false>(args, map, map, ring, expert, tasks.row_tile(tasks.first()), step);
      ring.advance();
    }
  }
  return ahead;
}

constexpr uint32_t kNoRow = 0xffffffffu;

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void produce_tiles(const GemmArgs& args, const TensorMap* map0, const TensorMap* map1, GemmRing ring) {
  using Shape = GemmShape<kMode, kTokens>;
  constexpr bool kFp8 = kMode == GemmMode::kFp8;
  constexpr int kElementBytes = kFp8 ? 1 : 2;
  constexpr int kRowsPerThread = kTokens / 16;
  const int thread = thread_index(), chunk = thread % 8;
  int ahead = kUp ? 0 : copy_first_weights<kMode, kTokens>(args, map0, ring);
  wait_for_previous_kernel();
  launch_dependents();  // after the wait: see copy_first_weights
  const GemmTasks<kUp> tasks(args);
  const int num_steps = ceil_div(args.depth, Shape::kDepth);
  const int scale_groups = kUp ? 1 : ceil_div(args.depth, 128);
  // A row of tokens starts at a multiple of 16 bytes: 32 bits reach 64 GiB.
  const auto row_vectors = static_cast<uint32_t>(args.token_stride * kElementBytes / 16);
  const auto token_row = [&](int position) {
    return args.sorted_pair != nullptr ? args.sorted_pair[position] / args.top_k : position;
  };
  for (int task = tasks.first(); task < tasks.count; task += tasks.step()) {
    const TokenTile tile = tasks.tile(task);
    const int row_tile = tasks.row_tile(task);
    uint32_t vectors[kRowsPerThread];  // where the rows of this thread start
    MOEOPT_UNROLL
    for (int j = 0; j < kRowsPerThread; ++j) {
      const int n = thread / 8 + 16 * j;
      // A column past the tile's count keeps old bytes: it only reaches sums that are never stored.
      vectors[j] = n < tile.count ? row_vectors * static_cast<uint32_t>(token_row(tile.begin + n)) : kNoRow;
    }
    constexpr int kScalesPerThread = kFp8 ? (kTokens + kProducerThreads - 1) / kProducerThreads : 1;
    const float* scale_sources[kScalesPerThread] = {};
    MOEOPT_UNROLL
    for (int i = 0; i < kScalesPerThread; ++i) {
      const int n = thread + i * kProducerThreads;
      if (kFp8 && n < tile.count) {
        scale_sources[i] = args.token_scale + static_cast<int64_t>(token_row(tile.begin + n)) * scale_groups;
      }
    }
    const float* factor_source = nullptr;
    if (kMode != GemmMode::kBf16 && args.scale_kind == ScaleKind::kBlock128 && thread < kFactors) {
      const int operand = thread / 4 % 2, first = first_row<kUp>(row_tile, thread / 8, operand);
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
        copy_weights<kMode, kTokens, kUp>(args, map0, map1, ring, tile.expert, row_tile, step);
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
      MOEOPT_UNROLL
      for (int i = 0; i < kScalesPerThread; ++i) {
        if (scale_sources[i] == nullptr || (kUp && step != num_steps - 1)) continue;
        const int n = thread + i * kProducerThreads;
        async_copy4(scales + token_scale_place(n), scale_sources[i] + (kUp ? 0 : step));
      }
      if (factor_source != nullptr) async_copy4(scales + kFactorOffset + thread, factor_source + step);
      async_copies_arrive(ring.full + ring.stage);
      ring.advance();
    }
  }
}

// One tile by one math warpgroup: its part of the ring, then the epilogue. kColumns: of the kTokens that the stage has
// room for, those that are multiplied.
template <GemmMode kMode, int kTokens, int kColumns, bool kUp>
MOEOPT_DEVICE void multiply_tile(const GemmArgs& args, const TokenTile& tile, int row_tile, GemmRing& ring,
                                 const Staging& staging) {
  using Shape = GemmShape<kMode, kTokens>;
  const int warpgroup = staging.warpgroup, lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  const int num_steps = ceil_div(args.depth, Shape::kDepth);
  const int first0 = first_row<kUp>(row_tile, warpgroup, 0);
  const int first1 = first_row<kUp>(row_tile, warpgroup, 1);
  const auto release = [&](int stage) {
    // In a pair either block's producers write into both.
    if (lane < (args.paired ? 2 : 1)) mbarrier_arrive_at(ring.empty + stage, lane);
  };
  const bool has_factors = kMode != GemmMode::kBf16 && args.scale_kind == ScaleKind::kBlock128;
  float sum0[kColumns / 2] = {}, sum1[kColumns / 2] = {};
  float factor0 = 1.0f, factor1 = 1.0f;
  const auto open_stage = [&] {
    mbarrier_wait(ring.full + ring.stage, ring.parity);
    fence_async_proxy();
    if (has_factors) {
      const auto* factors = reinterpret_cast<const float*>(ring.data() + Shape::kScaleOffset) + kFactorOffset;
      factor0 = factors[8 * warpgroup + warp];
      factor1 = factors[8 * warpgroup + 4 + warp];
    }
  };
  // FP8 opens the next stage while the tensor cores are busy with this one: nothing else is in flight meanwhile.
  constexpr bool kOpensAhead = kMode == GemmMode::kFp8;
  if (kOpensAhead) open_stage();
  int previous = -1;
  for (int step = 0; step < num_steps; ++step) {
    if (!kOpensAhead) open_stage();
    const unsigned char* stage = ring.data();
    if constexpr (kMode == GemmMode::kBf16) {
      multiply_bf16<kColumns>(stage, warpgroup, step == 0, sum0, sum1);
      wgmma_wait<1>();
      if (previous >= 0) release(previous);
    } else if constexpr (kMode == GemmMode::kFp8Weights) {
      float part0[kColumns / 2], part1[kColumns / 2];
      multiply_fp8_weights<kColumns>(stage, warpgroup, kTokens * 128, part0, part1);
      add_scaled<false, 0>(sum0, part0, factor0, nullptr);
      add_scaled<false, 0>(sum1, part1, factor1, nullptr);
      sync_warp();
      release(ring.stage);
    } else {
      // The tokens of kUp have one scale each: it is left for the last step, which brings it.
      const auto* token_scale = reinterpret_cast<const float*>(stage + Shape::kScaleOffset);
      const int opened = ring.stage;
      const float factor = factor1;  // of this stage
      const auto open_next = [&] {
        ring.advance();
        if (step < num_steps - 1) open_stage();
      };
      if constexpr (kColumns <= 64) {  // the second operand is multiplied while the first is added
        float part0[kColumns / 2], part1[kColumns / 2];
        multiply_fp8<kColumns>(stage, 2 * warpgroup, part0);
        multiply_fp8<kColumns>(stage, 2 * warpgroup + 1, part1);
        wgmma_wait<1>();
        add_scaled<!kUp, 0>(sum0, part0, factor0, token_scale);
        open_next();
        wgmma_wait<0>();
        add_scaled<!kUp, 0>(sum1, part1, factor, token_scale);
      } else {
        multiply_add_fp8<kColumns, !kUp>(stage, 2 * warpgroup, sum0, factor0, token_scale, [] {});
        multiply_add_fp8<kColumns, !kUp>(stage, 2 * warpgroup + 1, sum1, factor, token_scale, open_next);
      }
      sync_warp();  // all lanes have read the scales
      if (!kUp || step < num_steps - 1) release(opened);
      previous = opened;
    }
    if (!kOpensAhead) {
      previous = ring.stage;
      ring.advance();
    }
  }
  if constexpr (kMode == GemmMode::kBf16) {
    wgmma_wait<0>();
    release(previous);
  }
  touch_all(sum0);
  touch_all(sum1);
  if constexpr (kMode == GemmMode::kFp8 && kUp) {
    const auto* token_scale =
        reinterpret_cast<const float*>(ring.stages + previous * Shape::kStageBytes + Shape::kScaleOffset);
    scale_columns(sum0, token_scale);
    scale_columns(sum1, token_scale);
    sync_warp();
    release(previous);
  }
  const int thread_row = warp * 16 + lane / 4;
  // Rows of the weight matrix behind operand 0 and 1 of this thread; -1 past the end.
  int rows0[2], rows1[2];
  MOEOPT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i0 = first0 + thread_row + 8 * half, i1 = first1 + thread_row + 8 * half;
    rows0[half] = i0 >= args.rows ? -1 : kUp ? w13_row(args.activation, args.rows, i0, 0) : i0;
    rows1[half] = i1 >= args.rows ? -1 : kUp ? w13_row(args.activation, args.rows, i1, 1) : i1;
  }
  const RowTerms terms0 = row_terms(args, tile.expert, rows0), terms1 = row_terms(args, tile.expert, rows1);
  const auto value0 = [&](int r) { return sum0[r] * terms0.scale[r % 4 / 2] + terms0.bias[r % 4 / 2]; };
  const auto value1 = [&](int r) { return sum1[r] * terms1.scale[r % 4 / 2] + terms1.bias[r % 4 / 2]; };
  // Decided once, not per value: the tensor cores idle through all of this.
  const bool plain = args.bias == nullptr && args.scale_kind != ScaleKind::kChannel;
  constexpr int kStaged = Shape::kStagedTokens;
  if constexpr (kUp) {
    const auto store = [&](const auto& value) {
      store_tile<kColumns, kStaged, kMode == GemmMode::kFp8>(args, tile, first0, args.permute_out, staging, value);
    };
    if (args.activation != Activation::kSilu) {
      store([&](int r) { return swiglu(Activation::kSwigluOai, value0(r), value1(r)); });
    } else if (plain) {
      store([&](int r) { return swiglu(Activation::kSilu, sum0[r], sum1[r]); });
    } else {
      store([&](int r) { return swiglu(Activation::kSilu, value0(r), value1(r)); });
    }
  } else {
    const auto store = [&](int first, const auto& value) {
      store_tile<kColumns, kStaged, false>(args, tile, first, false, staging, value);
    };
    if (plain) {
      store(first0, [&](int r) { return sum0[r]; });
      store(first1, [&](int r) { return sum1[r]; });
    } else {
      store(first0, value0);
      store(first1, value1);
    }
  }
}

// The narrowest compiled width that holds the tile's tokens: fewer columns, less arithmetic.
template <GemmMode kMode, int kTokens, int kColumns, bool kUp>
MOEOPT_DEVICE void multiply_narrowest(const GemmArgs& args, const TokenTile& tile, int row_tile, GemmRing& ring,
                                      const Staging& staging) {
  constexpr int kNarrower = kNarrowerColumns<kTokens, kColumns>;
  if constexpr (kNarrower > 0) {
    if (tile.count <= kNarrower) {
      multiply_narrowest<kMode, kTokens, kNarrower, kUp>(args, tile, row_tile, ring, staging);
      return;
    }
  }
  multiply_tile<kMode, kTokens, kColumns, kUp>(args, tile, row_tile, ring, staging);
}

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void multiply_tiles(const GemmArgs& args, GemmRing ring, const Staging& staging) {
  wait_for_previous_kernel();
  const GemmTasks<kUp> tasks(args);
  for (int task = tasks.first(); task < tasks.count; task += tasks.step()) {
    multiply_narrowest<kMode, kTokens, kTokens, kUp>(args, tasks.tile(task), tasks.row_tile(task), ring, staging);
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
      mbarrier_init(barriers + args.num_stages + s, (args.paired ? 2 : 1) * (kGemmThreads - kProducerThreads) / 32);
    }
    fence_mbarrier_init();
  }
  if (args.paired) {
    sync_cluster();
  } else {
    sync_block();
  }
  const GemmRing ring(shared, barriers, args.num_stages, Shape::kStageBytes);
  if (thread_index() < kProducerThreads) {
    give_registers_back<kProducerRegisters>();
    produce_tiles<kMode, kTokens, kUp>(args, &map0, &map1, ring);
  } else {
    take_registers<kMathRegisters>();
    const Staging staging = {after_ring, uniform(thread_index() / 128) - 1, Shape::kStagingBytes, Shape::kStagedTokens};
    multiply_tiles<kMode, kTokens, kUp>(args, ring, staging);
  }
  if (args.paired) sync_cluster();  // the other block may still arrive at barriers of this one
}

}  // namespace moeopt
