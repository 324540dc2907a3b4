// Tile shapes, arguments and the ring of the grouped GEMM (grouped_gemm.cuh). The same numbers are computed and checked
// in moe_optimizer/ops/launch_geometry/grouped.py.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/fused_experts.h"
#include "moeopt/route_pairs.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

enum class GemmMode { kBf16, kFp8Weights, kFp8 };

constexpr int kGemmThreads = 384;
constexpr int kProducerThreads = 128;
constexpr int kBoxRows = 128;
constexpr int kBoxBytes = kBoxRows * 128;
constexpr int kOperandBytes = 64 * 128;  // rows of one instruction
constexpr int kExactColumns = 64;  // FP8 x FP8: up to so many columns partial sums are added in FP32
template <GemmMode kMode, int kTokens>
struct GemmShape {
  static constexpr int kBoxes = 2;
  static constexpr int kWeightBytes = kBoxes * kBoxBytes;
  static constexpr int kDepth = kMode == GemmMode::kBf16 ? 64 : 128;  // K per stage: 128 bytes of weights
  static constexpr int kTokenTiles = kMode == GemmMode::kFp8Weights ? 2 : 1;  // of 128 bytes per token
  static constexpr int kTokenBytes = kTokenTiles * kTokens * 128;
  // kFp8: scales of the tokens; both: of the weights; wide kFp8: ratios for the tokens. The next stage's alignment kept.
  static constexpr int kScaleBytes =
      kMode == GemmMode::kBf16 ? 0 : kMode == GemmMode::kFp8 && kTokens > kExactColumns ? 2048 : 1024;
  static constexpr int kScaleOffset = kWeightBytes + kTokenBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes + kScaleBytes;
  static constexpr int kStagedTokens = kTokens < 64 ? kTokens : 64;  // at a time, on their way out
  // Per math warpgroup: 64 BF16 per token; in FP8 also 1 / scale of all tokens.
  static constexpr int kStagingBytes = kStagedTokens * 128 + (kMode == GemmMode::kFp8 ? kTokens * 4 : 0);
};

// Scales of the weights in a stage: [math warpgroup][operand][warp]. I and H are multiples of 16, so the 16 rows of a
// warp lie in one block of 128; the 64 of an operand may not.
constexpr int kFactors = 16;
constexpr int kFactorOffset = 160;  // floats, behind the tokens' scales
constexpr int kRatioOffset = 192;

// 168 per thread at launch (65536 / 384, rounded down to 8); moved from the producers to the math warpgroups:
// 128 x 72 + 256 x 216 = 64512 = 384 x 168.
constexpr int kProducerRegisters = 72;
constexpr int kMathRegisters = 216;

// Where the scale of column n lies: the four that a thread has in 16 columns, 2t, 2t + 1, 2t + 8, 2t + 9, side by side.
MOEOPT_DEVICE int token_scale_place(int n) { return (n & ~15) | ((n & 6) << 1) | ((n & 8) >> 2) | (n & 1); }
// The scales of this thread's columns of the 16 columns from 16 q on.
MOEOPT_DEVICE void load_token_scales(float (&scales)[4], const float* token_scale, int q) {
  const Vec4 v = *reinterpret_cast<const Vec4*>(token_scale + 16 * q + thread_index() % 4 * 4);
  scales[0] = float_from_bits(v.x);
  scales[1] = float_from_bits(v.y);
  scales[2] = float_from_bits(v.z);
  scales[3] = float_from_bits(v.w);
}

struct GemmArgs {
  const void* tokens;  // BF16, permuted BF16 or E4M3 rows
  int64_t token_stride;  // elements
  const float* token_scale;  // kFp8; kUp: [rows], kDown: [rows][ceil(K / 128)]
  const int* sorted_token;   // kUp: row of the token at a position; kDown: row = position
  TokenTile* tiles;
  const int* num_tiles;
  int* tasks_taken;  // by blocks that have ended those they start with; zeroed by the routing
  uint16_t* out;  // BF16 rows by position
  int64_t out_stride;
  uint8_t* out_quantized;  // kFp8, kUp: E4M3 in the place of `out`
  float* out_scale;        // [rows by position][ceil(I / 128)]
  const float* weight_scale;
  const float* bias;
  int32_t depth;        // K
  int32_t rows;         // kUp: I; kDown: H
  int32_t weight_rows;  // kUp: 2 I; kDown: H
  ScaleKind scale_kind;
  Activation activation;
  bool weights_once;  // most experts have one tile
  bool paired;       // clusters of two blocks, see grouped_gemm.cuh
  int32_t num_stages;
};

struct GemmRing {
  unsigned char* stages;
  uint64_t *full, *empty;
  int num_stages, stage_bytes, stage = 0;
  uint32_t parity = 0;

  MOEOPT_DEVICE GemmRing(unsigned char* stages_, uint64_t* barriers, int num_stages_, int stage_bytes_)
      : stages(stages_), full(barriers), empty(barriers + num_stages_), num_stages(num_stages_),
        stage_bytes(stage_bytes_) {}
  MOEOPT_DEVICE unsigned char* data() const { return stages + stage * stage_bytes; }
  MOEOPT_DEVICE void advance() {
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

// The next narrower width that is compiled for tiles of kTokens; 0: none. Wide tiles have steps of 16 near the top,
// where the tiles of an evenly split expert lie; the last is half.
template <int kTokens>
constexpr int kHalfColumns = (kTokens / 2 + 15) / 16 * 16;
template <int kTokens, int kColumns>
constexpr int kNarrowerColumns = kTokens < 64 || kColumns == kHalfColumns<kTokens>     ? 0
                                 : kTokens >= 128 && kColumns > kTokens - 32 ? kColumns - 16
                                                                             : kHalfColumns<kTokens>;

// Rows of the output (kUp: of I) that one math warpgroup makes of one tile.
template <bool kUp>
constexpr int kRowsPerWarpgroup = kUp ? 64 : 128;

template <bool kUp>
MOEOPT_DEVICE int row_tiles(const GemmArgs& args) {
  return ceil_div(args.rows, 2 * kRowsPerWarpgroup<kUp>);
}
// First row of a math warpgroup's operand `a`.
template <bool kUp>
MOEOPT_DEVICE int first_row(int row_tile, int warpgroup, int a) {
  return (2 * row_tile + warpgroup) * kRowsPerWarpgroup<kUp> + (kUp ? 0 : a * 64);
}

// First row of a box of a stage. kUp: gate rows of both math warpgroups, then up rows; else the rows of one, then of the
// other.
template <bool kUp>
MOEOPT_DEVICE int box_row(int row_tile, int box) {
  return kUp ? row_tile * kBoxRows : (2 * row_tile + box) * kBoxRows;
}
// Where a math warpgroup's operand `a` lies in a stage.
template <bool kUp>
MOEOPT_DEVICE int operand_offset(int warpgroup, int a) {
  return (kUp ? 2 * a + warpgroup : 2 * warpgroup + a) * kOperandBytes;
}


// One tile: 256 weight rows x the tokens of a tile. The weights' warp deals them to the other warps of its block.
struct GemmTask {
  int expert;  // -1: there are no more
  int begin, count;  // positions of the tokens
  int row_tile, token_tile;

  MOEOPT_DEVICE TokenTile tile() const { return {expert, begin, count, 0}; }
  // In 16 bytes. An expert and a row tile have 16 bits each.
  MOEOPT_DEVICE Vec4 packed() const {
    return {expert < 0 ? ~0u : static_cast<uint32_t>(row_tile) << 16 | static_cast<uint32_t>(expert),
            static_cast<uint32_t>(begin), static_cast<uint32_t>(count), static_cast<uint32_t>(token_tile)};
  }
  MOEOPT_DEVICE static GemmTask unpacked(const Vec4& v) {
    return {v.x == ~0u ? -1 : static_cast<int>(v.x & 0xffffu), static_cast<int>(v.y), static_cast<int>(v.z),
            static_cast<int>(v.x >> 16), static_cast<int>(v.w)};
  }
};

// All tasks of a launch: the row tiles of one token tile after those of another; a pair of blocks takes pairs of token
// tiles. A block has two tasks by its index, and asks for each further one when it begins the last but one: which it
// gets depends on how fast the others are, what it computes does not.
template <bool kUp>
struct GemmTasks {
  const GemmArgs& args;
  int count;

  MOEOPT_DEVICE explicit GemmTasks(const GemmArgs& args_)
      : args(args_), count(load_shared_across_blocks(args_.num_tiles) / blocks() * row_tiles<kUp>(args_)) {}
  MOEOPT_DEVICE int blocks() const { return args.paired ? 2 : 1; }
  MOEOPT_DEVICE int first() const { return block_index() / blocks(); }
  MOEOPT_DEVICE int second() const { return first() + grid_blocks() / blocks(); }
  MOEOPT_DEVICE int ask() const { return 2 * (grid_blocks() / blocks()) + atomic_add_global(args.tasks_taken, 1); }
  // For block `rank` of the cluster.
  MOEOPT_DEVICE GemmTask at(int task, int rank) const {
    if (task >= count) return {-1, 0, 0, 0, 0};
    const int rows = row_tiles<kUp>(args), token_tile = task / rows * blocks() + rank;
    // From L2: the routing may belong to a launch that overlaps this one.
    const Vec4 v = load_shared_across_blocks16(args.tiles + token_tile);
    return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), task % rows, token_tile};
  }
};

// A block's tasks on their way to its warps, in shared memory. Nobody says when a place is free: the weights' warp is at
// most the stages of the ring, and two tasks, ahead of the slowest warp.
constexpr int kTaskPlaces = 16;
constexpr int kTaskQueueBytes = kTaskPlaces * (16 + 8) + 8;

struct TaskQueue {
  Vec4* places;
  uint64_t* dealt;  // a barrier per place
  uint64_t* ended;  // math warps that have none left
  int place = 0;
  uint32_t parity = 0;

  MOEOPT_DEVICE explicit TaskQueue(unsigned char* shared)
      : places(reinterpret_cast<Vec4*>(shared)), dealt(reinterpret_cast<uint64_t*>(shared + kTaskPlaces * 16)),
        ended(dealt + kTaskPlaces) {}
  MOEOPT_DEVICE void advance() {
    if (++place == kTaskPlaces) {
      place = 0;
      parity ^= 1u;
    }
  }
  MOEOPT_DEVICE GemmTask take() {
    mbarrier_wait(dealt + place, parity);
    const GemmTask task = GemmTask::unpacked(places[place]);
    advance();
    return task;
  }
  // One thread, for the warps of its own block. A block without others cannot send as below: an illegal instruction.
  MOEOPT_DEVICE void deal(const GemmTask& task) {
    places[place] = task.packed();
    mbarrier_arrive_at(dealt + place, 0);
  }
  // One thread of the pair, for the warps of block `rank`.
  MOEOPT_DEVICE void deal_in_pair(const GemmTask& task, int rank) {
    send16(places + place, dealt + place, rank, task.packed());
  }
};

}  // namespace moeopt
