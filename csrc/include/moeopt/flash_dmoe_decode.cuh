// FlashDMoE for small batches: router logits (or top-k ids) to combined output in one persistent launch.
//
//   every block                 router -> top-k -> sorted pairs -> slots (decode_routing.cuh), redundantly
//
//   4 producers     w13 tile chunks, then w2 tile chunks   ──cp.async.bulk──►  ring of stages in shared memory
//                   (never wait for GEMM1's results)                             full │   ▲ empty
//   8 math warps    tile of GEMM1: 16 gate + 16 up rows  x  a slot's tokens  ◄────────┘   │
//                     mma per warp over its part of K, sum of 8 warps, SwiGLU ──► h (L2) ─┼─► slot_arrivals[slot] += 1
//                   tile of GEMM2: 32 rows of w2  x  h of the slot                        │    (waits for all I/16)
//                     mma, sum of 8 warps ──► y FP32 (L2) ──► tile_arrivals[tile] += 1 ───┘
//                   last arrival of a tile: out[t] = sum_j weight[t, j] y[t, j], j ascending
//
// Tasks: g in [0, slots * I/16) are tiles of GEMM1, the following slots * H/32 tiles of GEMM2; block b takes g = b,
// b + grid, ... So every block finishes its GEMM1 tiles before it waits for any, and as all blocks are resident
// (cooperative launch) the waits end. While a block waits, its ring goes on filling with w2: at T = 1 the rings of 132
// blocks hold the whole of it.
//
// The weights are the 16-row operand of mma.m16n8k16, so 8 token columns come free. Along K the lanes read 16 bytes
// each of a row (lane t of a quad: bytes 16t of every 64), which permutes K; the tokens are read the same way, so both
// operands see the same permutation.
//
// Memory order: a tile's results are stored, the math warps meet at a barrier, one thread fences and adds to the
// counter; a reader acquires the counter and reads through L2. The last block to finish zeroes the counters for the
// next launch (they are zeroed once when the workspace is made).
//
// State: compiled and run in emulation on a CPU; not yet run on a GPU.
#pragma once

#include "moeopt/decode_routing.cuh"
#include "moeopt/device.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

// Which half of the work one launch does. The two halves chained with programmatic dependent launch are the
// alternative to the single launch.
enum class DecodePhase { kBoth, kUp, kDown };

struct DecodeArgs {
  FusedExpertsArgs moe;
  RouterArgs router;
  uint16_t* h;          // BF16 [T k, I], rows in sorted order
  float* y;             // [T k, H], rows in sorted order
  int* slot_arrivals;   // [T k]; zero between launches
  int* tile_arrivals;   // [ceil(H / 32)]; zero between launches
  int* block_arrivals;  // [1]; zero between launches
  int32_t num_stages;
  int32_t w13_chunk_bytes;  // of one weight row; multiple of 64, at most kChunkBytes
  int32_t w2_chunk_bytes;
};

constexpr int kDecodeMathWarps = 8;
// A bulk copy takes its operands from uniform registers, so the lanes of a warp issue theirs one after the other, in a
// loop of about 8 instructions. Four warps side by side keep that well ahead of the memory.
constexpr int kDecodeProducerWarps = 4;
constexpr int kDecodeThreads = (kDecodeMathWarps + kDecodeProducerWarps) * 32;
constexpr int kTileRows = 32;
constexpr int kRowsPerProducer = kTileRows / kDecodeProducerWarps;
constexpr int kStepBytes = 64;  // of a weight row per mma step: 4 lanes x 16 bytes
constexpr int kStepsPerWarp = 2;
constexpr int kChunkBytes = kDecodeMathWarps * kStepsPerWarp * kStepBytes;
// 64 more than a multiple of 128: the 8 lanes that one phase of a 16-byte load serves (2 rows x 4) hit all banks once.
constexpr int kRowPitch = kChunkBytes + 64;
constexpr int kStageBytes = kTileRows * kRowPitch;

template <int kColumnBlocks>
constexpr int kReductionBytes = kDecodeMathWarps * 2 * kColumnBlocks * 128 * 4;

// One task: a tile of 32 weight rows times the columns of one slot.
struct DecodeTask {
  bool is_up;
  int slot, expert, tile;
  int row_bytes, chunk_bytes;

  MOEOPT_DEVICE int num_chunks() const { return ceil_div(row_bytes, chunk_bytes); }
  MOEOPT_DEVICE int bytes_of(int chunk) const {
    const int left = row_bytes - chunk * chunk_bytes;
    return left < chunk_bytes ? left : chunk_bytes;
  }
};

template <int kWeightBytes>
struct DecodeSchedule {
  const DecodeArgs& args;
  const DecodeRouting& routing;
  int up_tiles, down_tiles, begin, end;

  MOEOPT_DEVICE DecodeSchedule(const DecodeArgs& args_, const DecodeRouting& routing_, DecodePhase phase)
      : args(args_), routing(routing_) {
    up_tiles = static_cast<int>(args.moe.intermediate_size) / 16;
    down_tiles = ceil_div(static_cast<int>(args.moe.hidden_size), kTileRows);
    const int up_tasks = routing.num_slots * up_tiles;
    begin = phase == DecodePhase::kDown ? up_tasks : 0;
    end = phase == DecodePhase::kUp ? up_tasks : up_tasks + routing.num_slots * down_tiles;
  }
  MOEOPT_DEVICE DecodeTask task(int g) const {
    DecodeTask task;
    task.is_up = g < routing.num_slots * up_tiles;
    if (!task.is_up) g -= routing.num_slots * up_tiles;
    const int tiles = task.is_up ? up_tiles : down_tiles;
    task.slot = g / tiles;
    task.tile = g % tiles;
    task.expert = routing.slot_expert[task.slot];
    task.row_bytes =
        kWeightBytes * static_cast<int>(task.is_up ? args.moe.hidden_size : args.moe.intermediate_size);
    task.chunk_bytes = task.is_up ? args.w13_chunk_bytes : args.w2_chunk_bytes;
    return task;
  }
};

// Row of the weight matrix in row r of a task's tile; -1 past the end of w2.
MOEOPT_DEVICE int weight_row(const FusedExpertsArgs& moe, const DecodeTask& task, int r) {
  if (task.is_up) {
    return w13_row(moe.activation, static_cast<int>(moe.intermediate_size), task.tile * 16 + r % 16, r / 16);
  }
  const int row = task.tile * kTileRows + r;
  return row < moe.hidden_size ? row : -1;
}

// The ring. 4 arrivals open `full` (one per producer warp, with its bytes), 8 open `empty` (one per math warp).
struct DecodeRing {
  unsigned char* stages;
  uint64_t* full;
  uint64_t* empty;
  int num_stages, stage = 0;
  uint32_t parity = 0;

  MOEOPT_DEVICE DecodeRing(unsigned char* stages_, uint64_t* barriers, int num_stages_)
      : stages(stages_), full(barriers), empty(barriers + num_stages_), num_stages(num_stages_) {}
  MOEOPT_DEVICE unsigned char* data() const { return stages + stage * kStageBytes; }
  MOEOPT_DEVICE void advance() {
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

// One producer warp: 8 rows of every tile, a lane each.
template <int kWeightBytes>
MOEOPT_DEVICE void produce(const DecodeArgs& args, const DecodeSchedule<kWeightBytes>& schedule, DecodeRing ring) {
  const int lane = thread_index() % 32;
  const int first_row = (thread_index() / 32 - kDecodeMathWarps) * kRowsPerProducer;
  const FusedExpertsArgs& moe = args.moe;
  for (int g = schedule.begin + block_index(); g < schedule.end; g += grid_blocks()) {
    const DecodeTask task = schedule.task(g);
    const int row = lane < kRowsPerProducer ? weight_row(moe, task, first_row + lane) : -1;
    const unsigned char* weights = static_cast<const unsigned char*>(task.is_up ? moe.w13 : moe.w2);
    const int64_t expert_stride = task.is_up ? moe.w13_expert_stride : moe.w2_expert_stride;
    const int64_t row_stride = task.is_up ? moe.w13_row_stride : moe.w2_row_stride;
    weights += (task.expert * expert_stride + (row < 0 ? 0 : row) * row_stride) * kWeightBytes;
    int num_rows = kRowsPerProducer;
    if (!task.is_up) {  // past the end of w2 there is nothing to copy
      const int left = static_cast<int>(moe.hidden_size) - task.tile * kTileRows - first_row;
      num_rows = left < 0 ? 0 : left < num_rows ? left : num_rows;
    }
    for (int chunk = 0; chunk < task.num_chunks(); ++chunk) {
      const int bytes = task.bytes_of(chunk);
      mbarrier_wait(ring.empty + ring.stage, ring.parity ^ 1u);
      if (lane == 0) mbarrier_arrive_expect_bytes(ring.full + ring.stage, static_cast<uint32_t>(num_rows * bytes));
      sync_warp();  // the byte count is announced before any byte can arrive
      if (row >= 0) {
        bulk_copy(ring.data() + (first_row + lane) * kRowPitch, weights + chunk * task.chunk_bytes,
                  static_cast<uint32_t>(bytes), ring.full + ring.stage);
      }
      ring.advance();
    }
  }
}

// What a warp needs of one chunk besides the weights: loaded before it waits for them.
template <int kWeightBytes, int kColumnBlocks>
struct TokenFragments {
  static constexpr int kVectors = 2 / kWeightBytes;  // 16 weights need 16 BF16 = 2 vectors, 8 weights need 1
  Vec4 tokens[kStepsPerWarp][kColumnBlocks][kVectors];
  float scale[kStepsPerWarp][2];
};

template <int kWeightBytes, int kColumnBlocks>
MOEOPT_DEVICE void load_tokens(const DecodeArgs& args, const DecodeTask& task, int chunk,
                               const uint16_t* const (&rows)[kColumnBlocks],
                               TokenFragments<kWeightBytes, kColumnBlocks>& fragments) {
  const int warp = thread_index() / 32, quad_lane = thread_index() % 4;
  const FusedExpertsArgs& moe = args.moe;
  const int bytes = task.bytes_of(chunk);
  MOEOPT_UNROLL
  for (int u = 0; u < kStepsPerWarp; ++u) {
    const int step = warp + u * kDecodeMathWarps;
    const int byte = step * kStepBytes + quad_lane * 16;
    const int64_t k = (chunk * task.chunk_bytes + byte) / kWeightBytes;
    MOEOPT_UNROLL
    for (int n = 0; n < kColumnBlocks; ++n) {
      MOEOPT_UNROLL
      for (int v = 0; v < TokenFragments<kWeightBytes, kColumnBlocks>::kVectors; ++v) {
        Vec4 value = {0, 0, 0, 0};
        if (rows[n] != nullptr && byte < bytes) {
          const uint16_t* source = rows[n] + k + v * 8;
          value = task.is_up ? load_constant16(source) : load_shared_across_blocks16(source);
        }
        fragments.tokens[u][n][v] = value;
      }
    }
    if (kWeightBytes == 1 && moe.scale_kind == ScaleKind::kBlock128 && step * kStepBytes < bytes) {
      // 64 weights of a step lie in one block of 128, and 16 rows of a tile do too.
      const int column = chunk * task.chunk_bytes + step * kStepBytes;
      MOEOPT_UNROLL
      for (int a = 0; a < 2; ++a) {
        const int row = weight_row(moe, task, a * 16);
        const int hidden = static_cast<int>(moe.hidden_size), width = static_cast<int>(moe.intermediate_size);
        fragments.scale[u][a] = task.is_up ? block_scale(moe.w13_scale, task.expert, 2 * width, hidden, row, column)
                                : row < 0  ? 0.0f
                                           : block_scale(moe.w2_scale, task.expert, hidden, width, row, column);
      }
    }
  }
}

// Both 16-row halves of the tile times the slot's columns, over this warp's steps of one chunk.
template <int kWeightBytes, int kColumnBlocks>
MOEOPT_DEVICE void multiply_chunk(const DecodeArgs& args, int bytes, const unsigned char* stage,
                                  const TokenFragments<kWeightBytes, kColumnBlocks>& fragments,
                                  float (&sums)[2][kColumnBlocks][4]) {
  const int warp = thread_index() / 32, group = thread_index() % 32 / 4, quad_lane = thread_index() % 4;
  MOEOPT_UNROLL
  for (int u = 0; u < kStepsPerWarp; ++u) {
    const int step = warp + u * kDecodeMathWarps;
    const int byte = step * kStepBytes + quad_lane * 16;
    if (step * kStepBytes >= bytes) continue;  // the same for the whole warp
    MOEOPT_UNROLL
    for (int a = 0; a < 2; ++a) {
      // Past the end of the row the stage holds old bytes, perhaps a NaN: zeros, since 0 * NaN is not 0.
      Vec4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
      if (byte < bytes) {
        const unsigned char* source = stage + (a * 16 + group) * kRowPitch + byte;
        low = *reinterpret_cast<const Vec4*>(source);
        high = *reinterpret_cast<const Vec4*>(source + 8 * kRowPitch);
      }
      const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
      MOEOPT_UNROLL
      for (int n = 0; n < kColumnBlocks; ++n) {
        const auto& tokens = fragments.tokens[u][n];
        if constexpr (kWeightBytes == 2) {
          mma_m16n8k16(sums[a][n], lows[0], highs[0], lows[1], highs[1], tokens[0].x, tokens[0].y);
          mma_m16n8k16(sums[a][n], lows[2], highs[2], lows[3], highs[3], tokens[0].z, tokens[0].w);
        } else {
          float partial[4] = {0, 0, 0, 0};
          MOEOPT_UNROLL
          for (int i = 0; i < 4; ++i) {
            const Vec4& vector = tokens[i / 2];
            mma_m16n8k16(partial, bf16x2_from_e4m3x2(lows[i]), bf16x2_from_e4m3x2(highs[i]),
                         bf16x2_from_e4m3x2(lows[i] >> 16), bf16x2_from_e4m3x2(highs[i] >> 16),
                         i % 2 ? vector.z : vector.x, i % 2 ? vector.w : vector.y);
          }
          const float scale = args.moe.scale_kind == ScaleKind::kBlock128 ? fragments.scale[u][a] : 1.0f;
          MOEOPT_UNROLL
          for (int r = 0; r < 4; ++r) sums[a][n][r] += scale * partial[r];
        }
      }
    }
  }
}

// Where the sum at index j of a 16 x 8 block lies: j = lane * 4 + register.
MOEOPT_DEVICE int block_row(int j) { return j / 16 + 8 * ((j & 3) >> 1); }
MOEOPT_DEVICE int block_column(int j) { return 2 * ((j >> 2) & 3) + (j & 1); }

// sums of half `a`, columns `n`, index j over the 8 warps, in warp order.
template <int kColumnBlocks>
MOEOPT_DEVICE float sum_over_warps(const float* reduction, int a, int n, int j) {
  float sum = 0;
  MOEOPT_UNROLL
  for (int w = 0; w < kDecodeMathWarps; ++w) sum += reduction[((w * 2 + a) * kColumnBlocks + n) * 128 + j];
  return sum;
}

template <int kColumnBlocks>
MOEOPT_DEVICE void finish_up_tile(const DecodeArgs& args, const DecodeTask& task, const DecodeRouting& routing,
                                  const float* reduction) {
  const FusedExpertsArgs& moe = args.moe;
  const int begin = routing.slot_begin[task.slot], count = routing.slot_begin[task.slot + 1] - begin;
  for (int index = thread_index(); index < kColumnBlocks * 128; index += kDecodeMathWarps * 32) {
    const int n = index / 128, j = index % 128;
    const int column = n * 8 + block_column(j), i = task.tile * 16 + block_row(j);
    if (column >= count) continue;
    float value[2];
    MOEOPT_UNROLL
    for (int a = 0; a < 2; ++a) {
      const int row = w13_row(moe.activation, static_cast<int>(moe.intermediate_size), i, a);
      const int rows = 2 * static_cast<int>(moe.intermediate_size);
      value[a] = sum_over_warps<kColumnBlocks>(reduction, a, n, j);
      if (moe.scale_kind == ScaleKind::kChannel) value[a] *= channel_scale(moe.w13_scale, task.expert, rows, row);
      if (moe.w13_bias != nullptr) value[a] += channel_scale(moe.w13_bias, task.expert, rows, row);
    }
    const uint32_t packed = pack_bf16x2(swiglu(moe.activation, value[0], value[1]), 0.0f);
    args.h[(begin + column) * moe.intermediate_size + i] = static_cast<uint16_t>(packed);
  }
}

template <int kColumnBlocks>
MOEOPT_DEVICE void finish_down_tile(const DecodeArgs& args, const DecodeTask& task, const DecodeRouting& routing,
                                    const float* reduction) {
  const FusedExpertsArgs& moe = args.moe;
  const int hidden = static_cast<int>(moe.hidden_size);
  const int begin = routing.slot_begin[task.slot], count = routing.slot_begin[task.slot + 1] - begin;
  for (int index = thread_index(); index < 2 * kColumnBlocks * 128; index += kDecodeMathWarps * 32) {
    const int j = index % 128, a = index / 128 % 2, n = index / 256;
    const int column = n * 8 + block_column(j), row = task.tile * kTileRows + a * 16 + block_row(j);
    if (column >= count || row >= hidden) continue;
    float value = sum_over_warps<kColumnBlocks>(reduction, a, n, j);
    if (moe.scale_kind == ScaleKind::kChannel) value *= channel_scale(moe.w2_scale, task.expert, hidden, row);
    if (moe.w2_bias != nullptr) value += channel_scale(moe.w2_bias, task.expert, hidden, row);
    args.y[static_cast<int64_t>(begin + column) * hidden + row] = value;
  }
}

// out[t][rows of the tile], by the math warps of the block that saw the tile's last arrival.
MOEOPT_DEVICE void combine_tile(const DecodeArgs& args, int tile, const DecodeRouting& routing) {
  const FusedExpertsArgs& moe = args.moe;
  const int hidden = static_cast<int>(moe.hidden_size), top_k = static_cast<int>(moe.top_k);
  const int num_tokens = static_cast<int>(moe.num_tokens);
  uint16_t* out = static_cast<uint16_t*>(moe.out);
  for (int index = thread_index(); index < num_tokens * kTileRows; index += kDecodeMathWarps * 32) {
    const int token = index / kTileRows, row = tile * kTileRows + index % kTileRows;
    if (row >= hidden) continue;
    float sum = 0;
    for (int p = token * top_k; p < (token + 1) * top_k; ++p) {
      const int position = routing.position[p];
      if (position >= 0) {
        sum += routing.weight[p] * load_shared_across_blocks(args.y + static_cast<int64_t>(position) * hidden + row);
      }
    }
    out[token * moe.out_stride + row] = static_cast<uint16_t>(pack_bf16x2(sum, 0.0f));
  }
}

constexpr int kMathBarrier = 1;  // named barrier of the math warps; 0 is sync_block's
MOEOPT_DEVICE void sync_math() { sync_named(kMathBarrier, kDecodeMathWarps * 32); }

// True in every math thread of the one block whose arrival is number `expected`. Earlier stores of all math threads
// are visible to whoever acquires the count.
MOEOPT_DEVICE bool arrive_is_last(int* counter, int expected, DecodeRouting& routing) {
  sync_math();
  if (thread_index() == 0) {
    fence_gpu();
    routing.is_last = atomic_add_global(counter, 1) == expected - 1;
    fence_gpu();
  }
  sync_math();
  return routing.is_last != 0;
}

template <int kWeightBytes, int kColumnBlocks, DecodePhase kPhase>
MOEOPT_DEVICE void consume(const DecodeArgs& args, const DecodeSchedule<kWeightBytes>& schedule,
                           DecodeRouting& routing, DecodeRing ring, float* reduction) {
  const int warp = thread_index() / 32, lane = thread_index() % 32, group = lane / 4;
  const FusedExpertsArgs& moe = args.moe;
  if constexpr (kPhase == DecodePhase::kDown) wait_for_previous_kernel();
  for (int g = schedule.begin + block_index(); g < schedule.end; g += grid_blocks()) {
    const DecodeTask task = schedule.task(g);
    const int begin = routing.slot_begin[task.slot], count = routing.slot_begin[task.slot + 1] - begin;
    if (kPhase == DecodePhase::kBoth && !task.is_up) {
      if (lane == 0) {
        while (load_acquire(args.slot_arrivals + task.slot) < schedule.up_tiles) back_off();
      }
      sync_warp();
    }
    const uint16_t* rows[kColumnBlocks];
    MOEOPT_UNROLL
    for (int n = 0; n < kColumnBlocks; ++n) {
      const int column = n * 8 + group;
      rows[n] = nullptr;
      if (column < count) {
        rows[n] = task.is_up ? static_cast<const uint16_t*>(moe.x) +
                                   routing.sorted_pair[begin + column] / static_cast<int>(moe.top_k) * moe.x_stride
                             : args.h + (begin + column) * moe.intermediate_size;
      }
    }
    float sums[2][kColumnBlocks][4] = {};
    for (int chunk = 0; chunk < task.num_chunks(); ++chunk) {
      TokenFragments<kWeightBytes, kColumnBlocks> fragments;
      load_tokens(args, task, chunk, rows, fragments);
      mbarrier_wait(ring.full + ring.stage, ring.parity);
      multiply_chunk(args, task.bytes_of(chunk), ring.data(), fragments, sums);
      sync_warp();
      if (lane == 0) mbarrier_arrive(ring.empty + ring.stage);
      ring.advance();
    }
    MOEOPT_UNROLL
    for (int a = 0; a < 2; ++a) {
      MOEOPT_UNROLL
      for (int n = 0; n < kColumnBlocks; ++n) {
        Vec4 bits = {bits_from_float(sums[a][n][0]), bits_from_float(sums[a][n][1]), bits_from_float(sums[a][n][2]),
                     bits_from_float(sums[a][n][3])};
        *reinterpret_cast<Vec4*>(reduction + ((warp * 2 + a) * kColumnBlocks + n) * 128 + lane * 4) = bits;
      }
    }
    sync_math();
    if (task.is_up) {
      finish_up_tile<kColumnBlocks>(args, task, routing, reduction);
      sync_math();
      if (kPhase == DecodePhase::kBoth && thread_index() == 0) {
        fence_gpu();
        atomic_add_global(args.slot_arrivals + task.slot, 1);
      }
    } else {
      finish_down_tile<kColumnBlocks>(args, task, routing, reduction);
      if (arrive_is_last(args.tile_arrivals + task.tile, routing.num_slots, routing)) {
        combine_tile(args, task.tile, routing);
        if (thread_index() == 0) args.tile_arrivals[task.tile] = 0;
      }
    }
  }
}

// A batch without a single valid pair has no tiles, but an output all the same.
MOEOPT_DEVICE void zero_output(const FusedExpertsArgs& moe) {
  uint16_t* out = static_cast<uint16_t*>(moe.out);
  const int64_t total = moe.num_tokens * moe.hidden_size;
  for (int64_t i = static_cast<int64_t>(block_index()) * block_threads() + thread_index(); i < total;
       i += static_cast<int64_t>(grid_blocks()) * block_threads()) {
    out[i / moe.hidden_size * moe.out_stride + i % moe.hidden_size] = 0;
  }
}

template <int kWeightBytes, int kColumnBlocks, DecodePhase kPhase>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kDecodeThreads, 1) flash_dmoe_decode_kernel(const MOEOPT_GRID_CONSTANT DecodeArgs args) {
  MOEOPT_SHARED_BASE(shared);
  float* reduction = reinterpret_cast<float*>(shared + args.num_stages * kStageBytes);
  auto* barriers = reinterpret_cast<uint64_t*>(shared + args.num_stages * kStageBytes +
                                               kReductionBytes<kColumnBlocks>);
  DecodeRouting& routing = *reinterpret_cast<DecodeRouting*>(barriers + 2 * args.num_stages);
  if (kPhase == DecodePhase::kUp) launch_dependents();
  if (thread_index() == 0) {
    for (int s = 0; s < args.num_stages; ++s) {
      mbarrier_init(barriers + s, kDecodeProducerWarps);
      mbarrier_init(barriers + args.num_stages + s, kDecodeMathWarps);
    }
    fence_mbarrier_init();
  }
  build_decode_routing<8 * kColumnBlocks>(args.moe, args.router, routing, shared);  // ends in sync_block
  if (routing.num_slots == 0) {
    if (kPhase != DecodePhase::kUp) zero_output(args.moe);
    return;
  }
  const DecodeSchedule<kWeightBytes> schedule(args, routing, kPhase);
  const DecodeRing ring(shared, barriers, args.num_stages);
  if (thread_index() / 32 >= kDecodeMathWarps) {
    produce<kWeightBytes>(args, schedule, ring);
    return;
  }
  consume<kWeightBytes, kColumnBlocks, kPhase>(args, schedule, routing, ring, reduction);
  if constexpr (kPhase == DecodePhase::kBoth) {
    if (arrive_is_last(args.block_arrivals, grid_blocks(), routing)) {  // nobody waits on a count any more
      for (int s = thread_index(); s < routing.num_slots; s += kDecodeMathWarps * 32) args.slot_arrivals[s] = 0;
      if (thread_index() == 0) *args.block_arrivals = 0;
    }
  }
}

}  // namespace moeopt
