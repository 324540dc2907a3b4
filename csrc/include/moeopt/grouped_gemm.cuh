// Grouped GEMM of the experts for middle and large batches: persistent, warp-specialised, weights as the 64-row operand.
//
//   tile = 256 weight rows x 16 .. 128 tokens of one expert, or 128 x 256; K in steps of 128 bytes of a weight row
//
//   producer warpgroup (threads 0-127)                     2 math warpgroups, 2 x 64 weight rows each
//     w  4 boxes of 64 rows ──TMA, 128-byte swizzle──► A ┐
//     tokens, gathered ──cp.async, swizzled by hand──► B ├─ ring ──full──►  wgmma m64 n{16..128}, FP32 accumulators
//     (activation scales ──cp.async──► S, FP8 only)      ┘       ◄─empty──  SwiGLU or nothing, BF16, through shared
//                                                                           memory ──16-byte stores──► h or y rows
//
//   kUp:   rows are 64 gate + the same 64 up of each math warpgroup, so a thread holds gate and up of one element
//   kDown: rows are 128 consecutive rows of w2 per math warpgroup
//
//   256 tokens: one operand of 64 rows per math warpgroup; kUp: 8 gates and their 8 ups in turns
//
// Token tiles come from the routing kernel's table, so the host never reads a count. Consecutive blocks take the row
// tiles of one token tile; token tiles of one expert are neighbours, so its weights are in L2 for the second.
//
// Modes: BF16 x BF16. FP8 weights x BF16 tokens: weights pass through registers, E4M3 to BF16 on the way, tokens
// permuted by prepare_tokens.cuh. FP8 x FP8: per-128 scales of both sides applied to FP32 partial sums.
//
// Barriers: full opens with 128 + 1 arrivals (every producer thread once its own copies have landed, and thread 0 with
// the TMA byte count); empty with 8 (one per math warp). cp.async data is made visible to the tensor cores by the
// thread that copied it: wait for the group, fence, arrive; that arrival trails the copies by kLag stages.
//
// State: compiled and run in emulation on a CPU; not yet run on a GPU.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/grouped_gemm_epilogue.cuh"
#include "moeopt/grouped_gemm_shape.cuh"

namespace moeopt {

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void produce_tiles(const GemmArgs& args, const TensorMap* map0, const TensorMap* map1, GemmRing ring) {
  using Shape = GemmShape<kMode, kTokens>;
  constexpr int kElementBytes = kMode == GemmMode::kFp8 ? 1 : 2;
  constexpr int kRowsPerThread = kTokens / 16;
  const int thread = thread_index(), chunk = thread % 8;
  const int num_row_tiles = row_tiles<kUp, Shape::kWide>(args), num_tasks = *args.num_tiles * num_row_tiles;
  const int num_steps = ceil_div(args.depth, Shape::kDepth), scale_groups = ceil_div(args.depth, 128);
  GemmRing landed = ring;  // the next stage whose copies have not been signalled
  int behind = 0;
  const auto signal = [&] {
    fence_async_proxy();
    mbarrier_arrive(landed.full + landed.stage);
    landed.advance();
    --behind;
  };
  for (int task = block_index(); task < num_tasks; task += grid_blocks()) {
    const TokenTile tile = load_tile(args.tiles + task / num_row_tiles);
    const int row_tile = task % num_row_tiles;
    int token_rows[kRowsPerThread];  // -1: no such column
    MOEOPT_UNROLL
    for (int j = 0; j < kRowsPerThread; ++j) {
      const int n = thread / 8 + 16 * j;
      token_rows[j] = -1;
      if (n < tile.count) {
        const int position = tile.begin + n;
        token_rows[j] = args.sorted_pair != nullptr ? args.sorted_pair[position] / args.top_k : position;
      }
    }
    const float* scale_source = nullptr;
    if (kMode == GemmMode::kFp8 && thread < tile.count) {
      const int position = tile.begin + thread;
      const int64_t row = args.sorted_pair != nullptr ? args.sorted_pair[position] / args.top_k : position;
      scale_source = args.token_scale + row * scale_groups;
    }
    for (int step = 0; step < num_steps; ++step) {
      mbarrier_wait(ring.empty + ring.stage, ring.parity ^ 1u);
      unsigned char* stage = ring.data();
      uint64_t* full = ring.full + ring.stage;
      if (thread == 0) {
        mbarrier_arrive_expect_bytes(full, Shape::kWeightBytes);
        MOEOPT_UNROLL
        for (int box = 0; box < Shape::kBoxes; ++box) {
          unsigned char* to = stage + box * kBoxBytes;
          if constexpr (Shape::kWide) {
            tensor_copy_groups(to, map0, step * Shape::kDepth, first_row<kUp, true>(row_tile, box, 0) / 8, tile.expert,
                               full);
          } else {
            tensor_copy(to, box % 2 ? map1 : map0, step * Shape::kDepth,
                        first_row<kUp, false>(row_tile, box / 2, box % 2), tile.expert, full);
          }
        }
      }
      MOEOPT_UNROLL
      for (int j = 0; j < kRowsPerThread; ++j) {
        // A column past the tile's count keeps old bytes: it only reaches sums that are never stored.
        if (token_rows[j] < 0) continue;
        const unsigned char* source =
            static_cast<const unsigned char*>(args.tokens) + token_rows[j] * args.token_stride * kElementBytes;
        const int n = thread / 8 + 16 * j;
        unsigned char* to = stage + Shape::kWeightBytes + n * 128 + ((chunk ^ (n & 7)) << 4);
        MOEOPT_UNROLL
        for (int half = 0; half < Shape::kTokenTiles; ++half) {
          const int byte = step * Shape::kTokenTiles * 128 + half * 128 + chunk * 16;
          // Past the end of K the weights arrive as zeros, so must the tokens: 0 * NaN is not 0.
          const bool inside = byte < args.depth * kElementBytes;
          async_copy16(to + half * kTokens * 128, source + (inside ? byte : 0), inside);
        }
      }
      if (scale_source != nullptr) {
        async_copy4(stage + Shape::kWeightBytes + Shape::kTokenBytes + thread * 4, scale_source + step);
      }
      async_copy_commit();
      ring.advance();
      if (++behind > kLag) {
        async_copy_wait<kLag>();
        signal();
      }
    }
  }
  async_copy_wait<0>();
  while (behind > 0) signal();
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

// The same for tiles of 256 tokens: one operand.
template <int kColumns>
MOEOPT_DEVICE void multiply_bf16_wide(const unsigned char* stage, int warpgroup, bool first,
                                      float (&sum)[kColumns / 2]) {
  const uint64_t a = swizzled_descriptor(stage + warpgroup * kBoxBytes);
  const uint64_t b = swizzled_descriptor(stage + 2 * kBoxBytes);
  wgmma_fence();
  MOEOPT_UNROLL
  for (int k = 0; k < 4; ++k) {
    wgmma_bf16(sum, advance_descriptor(a, 32 * k), advance_descriptor(b, 32 * k), !first || k > 0);
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

// One stage of FP8 x FP8, one operand: 4 steps of K = 32.
template <int kColumns>
MOEOPT_DEVICE void multiply_fp8(const unsigned char* stage, int box, float (&part)[kColumns / 2]) {
  const uint64_t a = swizzled_descriptor(stage + box * kBoxBytes);
  const uint64_t b = swizzled_descriptor(stage + 4 * kBoxBytes);
  wgmma_fence();
  MOEOPT_UNROLL
  for (int k = 0; k < 4; ++k) wgmma_e4m3(part, advance_descriptor(a, 32 * k), advance_descriptor(b, 32 * k), k > 0);
  wgmma_commit();
  wgmma_wait<0>();
}

template <int kColumns>
MOEOPT_DEVICE void add_scaled(float (&sum)[kColumns / 2], float (&part)[kColumns / 2], const float (&row_scale)[2],
                              const float* token_scale) {
  touch_all(part);
  MOEOPT_UNROLL
  for (int r = 0; r < kColumns / 2; ++r) {
    const float scale = token_scale == nullptr ? 1.0f : token_scale[r / 4 * 8 + thread_index() % 4 * 2 + r % 2];
    sum[r] += row_scale[r % 4 / 2] * scale * part[r];
  }
}

// One tile by one math warpgroup: its part of the ring, then the epilogue. kColumns: of the kTokens that the stage has
// room for, those that are multiplied.
template <GemmMode kMode, int kTokens, int kColumns, bool kUp>
MOEOPT_DEVICE void multiply_tile(const GemmArgs& args, const TokenTile& tile, int row_tile, GemmRing& ring,
                                 uint16_t* staging) {
  using Shape = GemmShape<kMode, kTokens>;
  const int warpgroup = thread_index() / 128 - 1, lane = thread_index() % 32;
  const int thread_row = thread_index() / 32 % 4 * 16 + lane / 4;
  const int num_steps = ceil_div(args.depth, Shape::kDepth);
  const int first0 = first_row<kUp, false>(row_tile, warpgroup, 0);
  const int first1 = first_row<kUp, false>(row_tile, warpgroup, 1);
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
  float sum0[kColumns / 2] = {}, sum1[kColumns / 2] = {};
  int previous = -1;
  for (int step = 0; step < num_steps; ++step) {
    float factors0[2] = {1.0f, 1.0f}, factors1[2] = {1.0f, 1.0f};
    if (kMode != GemmMode::kBf16 && args.scale_kind == ScaleKind::kBlock128) {
      MOEOPT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row0 = rows0[half] < 0 ? 0 : rows0[half], row1 = rows1[half] < 0 ? 0 : rows1[half];
        factors0[half] = block_scale(args.weight_scale, tile.expert, args.weight_rows, args.depth, row0, step * 128);
        factors1[half] = block_scale(args.weight_scale, tile.expert, args.weight_rows, args.depth, row1, step * 128);
      }
    }
    mbarrier_wait(ring.full + ring.stage, ring.parity);
    const unsigned char* stage = ring.data();
    if constexpr (kMode == GemmMode::kBf16) {
      multiply_bf16<kColumns>(stage, warpgroup, step == 0, sum0, sum1);
      wgmma_wait<1>();
      if (previous >= 0) release(previous);
      previous = ring.stage;
    } else if constexpr (kMode == GemmMode::kFp8Weights) {
      float part0[kColumns / 2], part1[kColumns / 2];
      multiply_fp8_weights<kColumns>(stage, warpgroup, kTokens * 128, part0, part1);
      add_scaled<kColumns>(sum0, part0, factors0, nullptr);
      add_scaled<kColumns>(sum1, part1, factors1, nullptr);
      sync_warp();
      release(ring.stage);
    } else {
      const auto* token_scale = reinterpret_cast<const float*>(stage + Shape::kWeightBytes + Shape::kTokenBytes);
      float part[kColumns / 2];
      multiply_fp8<kColumns>(stage, 2 * warpgroup, part);
      add_scaled<kColumns>(sum0, part, factors0, token_scale);
      multiply_fp8<kColumns>(stage, 2 * warpgroup + 1, part);
      add_scaled<kColumns>(sum1, part, factors1, token_scale);
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
  if constexpr (kUp) {
    store_tile<kColumns, kUp>(args, tile, first0, staging, warpgroup,
                              [&](int r) { return swiglu(args.activation, value0(r), value1(r)); });
  } else {
    store_tile<kColumns, kUp>(args, tile, first0, staging, warpgroup, value0);
    store_tile<kColumns, kUp>(args, tile, first1, staging, warpgroup, value1);
  }
}

// One tile of 256 tokens (BF16). Up: row g of a fragment is a gate, row g + 8 the up of the same element.
template <int kTokens, int kColumns, bool kUp>
MOEOPT_DEVICE void multiply_wide_tile(const GemmArgs& args, const TokenTile& tile, int row_tile, GemmRing& ring,
                                      uint16_t* staging) {
  using Shape = GemmShape<GemmMode::kBf16, kTokens>;
  const int warpgroup = thread_index() / 128 - 1, lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  const int num_steps = ceil_div(args.depth, Shape::kDepth), first = first_row<kUp, true>(row_tile, warpgroup, 0);
  float sum[kColumns / 2] = {};
  int previous = -1;
  for (int step = 0; step < num_steps; ++step) {
    mbarrier_wait(ring.full + ring.stage, ring.parity);
    multiply_bf16_wide<kColumns>(ring.data(), warpgroup, step == 0, sum);
    wgmma_wait<1>();
    if (previous >= 0 && lane == 0) mbarrier_arrive(ring.empty + previous);
    previous = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  if (lane == 0) mbarrier_arrive(ring.empty + previous);
  touch_all(sum);
  int rows[2];
  MOEOPT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = first + (kUp ? warp * 8 + lane / 4 : warp * 16 + lane / 4 + 8 * half);
    rows[half] = i >= args.rows ? -1 : kUp ? w13_row(args.activation, args.rows, i, half) : i;
  }
  const RowTerms terms = row_terms(args, tile.expert, rows);
  const auto value = [&](int r) { return sum[r] * terms.scale[r % 4 / 2] + terms.bias[r % 4 / 2]; };
  if constexpr (kUp) {
    store_up_tile<kColumns>(args, tile, first, staging, warpgroup,
                            [&](int r) { return swiglu(args.activation, value(r), value(r + 2)); });
  } else {
    MOEOPT_UNROLL
    for (int half = 0; half < kColumns / 128; ++half) {
      const int left = tile.count - half * 128;
      const TokenTile part = {tile.expert, tile.begin + half * 128, left < 128 ? left : 128, 0};
      store_tile<128, false>(args, part, first, staging, warpgroup, [&](int r) { return value(r + half * 64); });
    }
  }
}

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void multiply_tiles(const GemmArgs& args, GemmRing ring, uint16_t* staging) {
  using Shape = GemmShape<kMode, kTokens>;
  const int warpgroup = thread_index() / 128 - 1;
  const int num_row_tiles = row_tiles<kUp, Shape::kWide>(args), num_tasks = *args.num_tiles * num_row_tiles;
  staging += warpgroup * (Shape::kStagingBytes / 2);
  for (int task = block_index(); task < num_tasks; task += grid_blocks()) {
    const TokenTile tile = load_tile(args.tiles + task / num_row_tiles);
    const int row_tile = task % num_row_tiles;
    // An expert's last tile is often half empty: half the columns, half the arithmetic. Only where that is the bound.
    const bool half = kTokens >= 64 && tile.count <= kTokens / 2;
    if constexpr (Shape::kWide) {
      if (half) {
        multiply_wide_tile<kTokens, kTokens / 2, kUp>(args, tile, row_tile, ring, staging);
      } else {
        multiply_wide_tile<kTokens, kTokens, kUp>(args, tile, row_tile, ring, staging);
      }
    } else if constexpr (kTokens >= 64) {
      if (half) {
        multiply_tile<kMode, kTokens, kTokens / 2, kUp>(args, tile, row_tile, ring, staging);
      } else {
        multiply_tile<kMode, kTokens, kTokens, kUp>(args, tile, row_tile, ring, staging);
      }
    } else {
      multiply_tile<kMode, kTokens, kTokens, kUp>(args, tile, row_tile, ring, staging);
    }
  }
}

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kGemmThreads, 1)
    grouped_gemm_kernel(const MOEOPT_GRID_CONSTANT TensorMap map0, const MOEOPT_GRID_CONSTANT TensorMap map1,
                        const MOEOPT_GRID_CONSTANT GemmArgs args) {
  using Shape = GemmShape<kMode, kTokens>;
  MOEOPT_SHARED_BASE(shared);
  unsigned char* after_ring = shared + args.num_stages * Shape::kStageBytes;
  auto* staging = reinterpret_cast<uint16_t*>(after_ring);
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
    give_registers_back<Shape::kProducerRegisters>();
    produce_tiles<kMode, kTokens, kUp>(args, &map0, &map1, ring);
  } else {
    take_registers<Shape::kMathRegisters>();
    multiply_tiles<kMode, kTokens, kUp>(args, ring, staging);
  }
}

}  // namespace moeopt
