// Tile shapes, arguments, stage ring and tile scheduler of the grouped GEMM (grouped_gemm_sm90.cuh).
// launch/geometry.h chooses the ring's stages and checks that it cannot deadlock.
#pragma once

#include <type_traits>
#include <utility>

#include "moeopt/device.cuh"
#include "moeopt/fused_experts.h"
#include "moeopt/int4.cuh"
#include "moeopt/route_pairs.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kGemmThreads = 384;
constexpr int kProducerThreads = 128;
constexpr int kBoxRows = 128;
constexpr int kBoxBytes = kBoxRows * 128;
constexpr int kOperandBytes = 64 * 128;  // rows of one instruction
constexpr int kExactColumns = 64;        // FP8 x FP8: up to this many columns, partial sums are added in FP32

// Widths of a token tile that are compiled, up to where the sums fit the registers.
template <GemmMode kMode>
using CompiledTiles = std::conditional_t<
    kMode == GemmMode::kBf16, std::integer_sequence<int, 16, 32, 64, 96, 128, 160>,
    std::conditional_t<
        kMode == GemmMode::kFp8Weights, std::integer_sequence<int, 16, 32, 64>,
        std::conditional_t<kMode == GemmMode::kMxfp4Weights || kMode == GemmMode::kInt4Weights,
                           std::integer_sequence<int, 16, 32, 64, 128>,
                           std::conditional_t<kMode == GemmMode::kMxfp4, std::integer_sequence<int, 64, 96, 128>,
                                              std::integer_sequence<int, 32, 64, 96, 144>>>>>;

// Whether the tokens become E4M3, too.
constexpr bool rounds_tokens(GemmMode mode) { return mode == GemmMode::kFp8 || mode == GemmMode::kMxfp4; }

// INT4: of a row in a stage. Up to 8 scales in at most 5 words, then up to 8 zero points in at most 3.
constexpr int kInt4RowBytes = 32;
constexpr int kInt4ZeroOffset = 20;

template <GemmMode kMode, int kTokens>
struct GemmShape {
  static constexpr int kBoxes = 2;
  static constexpr int kWeightBytes = kBoxes * kBoxBytes;
  static constexpr bool kMxfp4 = kMode == GemmMode::kMxfp4Weights || kMode == GemmMode::kMxfp4;
  static constexpr bool kInt4 = kMode == GemmMode::kInt4Weights;
  static constexpr bool kFourBits = kMxfp4 || kInt4;
  static constexpr bool kRoundsTokens = rounds_tokens(kMode);
  static constexpr int kMapStep = kMode == GemmMode::kBf16 ? 64 : 128;  // elements of the tensor map in 128 bytes
  static constexpr int kDepth = kFourBits ? 256 : kMapStep;             // K per stage: 128 bytes of weights
  static constexpr int kTokenTiles = kMode == GemmMode::kFp8Weights ? 2
                                     : !kFourBits                   ? 1
                                     : kRoundsTokens                ? 2
                                                                    : 4;  // 128 bytes per token
  static constexpr int kTokenBytes = kTokenTiles * kTokens * 128;
  // MXFP4: of the exponents of a row in a stage; kMxfp4 has to save bytes for a third stage.
  static constexpr int kExponentBytes = kMode == GemmMode::kMxfp4 ? 12 : 16;
  // Scales of the weights; kFp8: of the tokens too; wide kFp8: and ratios; MXFP4: exponents; kMxfp4: and the tokens'
  // scales and ratios; INT4: scales and zero points of the groups. Rounded up to keep the next stage aligned.
  static constexpr int kScaleBytes = kMode == GemmMode::kBf16    ? 0
                                     : kMode == GemmMode::kMxfp4 ? kBoxes * kBoxRows * kExponentBytes + 2048
                                     : kMxfp4                    ? kBoxes * kBoxRows * kExponentBytes
                                     : kInt4                     ? kBoxes * kBoxRows * kInt4RowBytes
                                     : kMode == GemmMode::kFp8 && kTokens > kExactColumns ? 2048
                                                                                          : 1024;
  static constexpr int kScaleOffset = kWeightBytes + kTokenBytes;
  // Whether the scales of a tile's groups may lie beside the ring instead (TileScales). Wide tiles lack shared memory
  // for it, and have products enough to hide the copies: MXFP4's of 64 tokens were faster without.
  static constexpr bool kTileScales = (kInt4 && kTokens <= 64) || (kMode == GemmMode::kMxfp4Weights && kTokens <= 32);
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes + kScaleBytes;
  static constexpr int kStageBytesBeside = kWeightBytes + kTokenBytes;  // with the scales beside the ring
  static constexpr int kStagedTokens = kTokens < 64 ? kTokens : 64;     // of the staging buffer
  // Per math warpgroup: 64 BF16 per token; in FP8 also 1 / scale of all tokens.
  static constexpr int kStagingBytes = kStagedTokens * 128 + (kRoundsTokens ? kTokens * 4 : 0);
};

// Scales of the weights in a stage: [math warpgroup][operand][warp]. I and H are multiples of 16, so the 16 rows of a
// warp lie in one block of 128; the 64 of an operand may not.
constexpr int kFactors = 16;
constexpr int kFactorOffset = 160;  // floats, behind the tokens' scales
constexpr int kRatioOffset = 192;
// kMxfp4, floats behind the exponents: the tokens' scales, then ratios before each of the stage's two 128 of K.
constexpr int kMxfp4Ratios = 128;

// Registers per thread. At launch 168 (65536 / 384, rounded down to 8); setmaxnreg moves them from the producers to the
// math warpgroups: 128 x 72 + 256 x 216 = 64512 = 384 x 168.
constexpr int kProducerRegisters = 72;
constexpr int kMathRegisters = 216;
static_assert(kProducerThreads * kProducerRegisters + (kGemmThreads - kProducerThreads) * kMathRegisters <=
                  65536 / kGemmThreads / 8 * 8 * kGemmThreads,
              "more registers than the block has at launch");

// Index of the scale of column n. A thread has columns 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16; their scales are
// adjacent.
MOEOPT_DEVICE int token_scale_place(int n) { return (n & ~15) | ((n & 6) << 1) | ((n & 8) >> 2) | (n & 1); }
// Loads the scales of this thread's columns among the 16 columns from 16 q on.
MOEOPT_DEVICE void load_token_scales(float (&scales)[4], const float* token_scale, int q) {
  const Vec4 v = *reinterpret_cast<const Vec4*>(token_scale + 16 * q + thread_index() % 4 * 4);
  scales[0] = float_from_bits(v.x);
  scales[1] = float_from_bits(v.y);
  scales[2] = float_from_bits(v.z);
  scales[3] = float_from_bits(v.w);
}

struct GemmArgs {
  const void* tokens;        // BF16, permuted BF16 or E4M3 rows; four bits: as long as token_stride, else as `depth`
  int64_t token_stride;      // elements
  const float* token_scale;  // kFp8; kUp: [rows], kDown: [rows][ceil(K / 128)]
  const int* sorted_token;   // kUp: row of the token at a position; kDown: row = position
  TokenTile* tiles;
  const int* num_tiles;
  int* tile_counter;  // work tiles taken beyond the first two of every block; the routing sets it to zero
  uint16_t* out;      // BF16 rows by position
  int64_t out_stride;
  uint8_t* out_quantized;  // kFp8, kUp: E4M3 instead of `out`
  float* out_scale;        // [rows by position][ceil(I / 128)]
  const float* weight_scale;
  const float* bias;
  int32_t depth;        // K
  int32_t rows;         // kUp: I; kDown: H
  int32_t weight_rows;  // kUp: 2 I; kDown: H
  ScaleKind scale_kind;
  Activation activation;
  bool weights_evict_first;  // most experts have one token tile
  bool paired;               // clusters of two blocks, see grouped_gemm_sm90.cuh
  int32_t num_stages;
  const uint8_t* exponents;    // MXFP4; late, so that kernels without it stay the instructions they were
  Int4Factors int4;            // likewise
  int32_t scale_buffers;       // four bits in BF16 products: see TileScales; 0: the scales lie in the stages
  int32_t scale_buffer_bytes;  // of each
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

// Four bits: exponents of a work tile's rows, or INT4's scales and then zero points, of all of K, in buffers beside the
// ring: [256 rows][groups], in the order of memory. They are few bytes but many rows: copied stage by stage they cost
// up to an eighth of the time. The tiles take the buffers in turns. Rows past the last keep old bytes.
//
//   full[buffer]   1 arrival, with the bytes of the bulk copies
//   empty[buffer]  8, one per math warp
constexpr int kMostScaleBuffers = 4;
constexpr int kScaleBarrierBytes = 2 * kMostScaleBuffers * 8;

struct TileScales {
  const GemmArgs& args;
  unsigned char* buffers;
  uint64_t* barriers;
  int buffer = 0;
  uint32_t parity = 0;

  MOEOPT_DEVICE TileScales(const GemmArgs& args_, unsigned char* buffers_, uint64_t* barriers_)
      : args(args_), buffers(buffers_), barriers(barriers_) {}
  // Else the scales lie in the stages.
  MOEOPT_DEVICE bool used() const { return args.scale_buffers > 0; }
  MOEOPT_DEVICE uint64_t* full() const { return barriers + buffer; }
  MOEOPT_DEVICE uint64_t* empty() const { return barriers + kMostScaleBuffers + buffer; }
  MOEOPT_DEVICE unsigned char* data() const { return buffers + buffer * args.scale_buffer_bytes; }
  // All lanes of the warp are done with the buffer.
  MOEOPT_DEVICE void release() const {
    if (thread_index() % 32 == 0) mbarrier_arrive_cluster(empty(), args.paired ? cluster_ctarank() : 0);
  }
  MOEOPT_DEVICE void advance() {
    if (++buffer == args.scale_buffers) {
      buffer = 0;
      parity ^= 1u;
    }
  }
};

// In the place of TileScales in kernels that have no scales of four bits, or in E4M3: nothing, so that those kernels
// stay the instructions they were.
struct NoTileScales {
  MOEOPT_DEVICE NoTileScales(const GemmArgs&, unsigned char*, uint64_t*) {}
  MOEOPT_DEVICE static constexpr bool used() { return false; }
};
template <GemmMode kMode>
constexpr bool kHasTileScales = kMode == GemmMode::kMxfp4Weights || kMode == GemmMode::kInt4Weights;
template <GemmMode kMode>
using ScalesBeside = std::conditional_t<kHasTileScales<kMode>, TileScales, NoTileScales>;

// The next narrower width that is compiled for tiles of kTokens; 0: none. Wide tiles have steps of 16 near the top,
// where the tiles of an evenly split expert lie. The last width is half.
template <int kTokens>
constexpr int kHalfColumns = (kTokens / 2 + 15) / 16 * 16;
template <int kTokens, int kColumns>
constexpr int kNarrowerColumns = kTokens < 64 || kColumns == kHalfColumns<kTokens> ? 0
                                 : kTokens >= 128 && kColumns > kTokens - 32       ? kColumns - 16
                                                                                   : kHalfColumns<kTokens>;

// Rows of the output (kUp: of I) that one math warpgroup computes per work tile.
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

// Rows from one warp of a math warpgroup to the next, in an operand. With four bits the warps of kUp are 32 rows apart
// and those of the other warpgroup lie between: 64 rows of h then fill whole 16 bytes of the order of mxfp4_position.
template <GemmMode kMode, bool kUp>
constexpr int kWarpRows = GemmShape<kMode, 16>::kFourBits && kUp ? 32 : 16;
// First row of operand `a` that the math warpgroup has.
template <GemmMode kMode, bool kUp>
MOEOPT_DEVICE int first_of_operand(int row_tile, int warpgroup, int a) {
  if constexpr (kWarpRows<kMode, kUp> == 32) return row_tile * kBoxRows + 16 * warpgroup;
  return first_row<kUp>(row_tile, warpgroup, a);
}

// First row of a box of a stage. kUp: gate rows of both math warpgroups, then up rows; kDown: the rows of one
// warpgroup, then of the other.
template <bool kUp>
MOEOPT_DEVICE int box_row(int row_tile, int box) {
  return kUp ? row_tile * kBoxRows : (2 * row_tile + box) * kBoxRows;
}
// Byte offset of a math warpgroup's operand `a` in a stage.
template <bool kUp>
MOEOPT_DEVICE int operand_offset(int warpgroup, int a) {
  return (kUp ? 2 * a + warpgroup : 2 * warpgroup + a) * kOperandBytes;
}

// 256 weight rows x one token tile.
struct WorkTile {
  int expert;        // -1: no work is left
  int begin, count;  // positions of the tokens
  int row_tile, token_tile;

  MOEOPT_DEVICE TokenTile tile() const { return {expert, begin, count, 0}; }
  // As 16 bytes: expert and row tile take 16 bits each.
  MOEOPT_DEVICE Vec4 packed() const {
    return {expert < 0 ? ~0u : static_cast<uint32_t>(row_tile) << 16 | static_cast<uint32_t>(expert),
            static_cast<uint32_t>(begin), static_cast<uint32_t>(count), static_cast<uint32_t>(token_tile)};
  }
  MOEOPT_DEVICE static WorkTile unpacked(const Vec4& v) {
    return {v.x == ~0u ? -1 : static_cast<int>(v.x & 0xffffu), static_cast<int>(v.y), static_cast<int>(v.z),
            static_cast<int>(v.x >> 16), static_cast<int>(v.w)};
  }
};

// Persistent scheduler. Work tiles are numbered row tile by row tile within a token tile; a cluster takes pairs of
// token tiles. Every block (or cluster) has two work tiles by its index and takes further ones from a counter, each
// when it begins the last but one. Speed decides which block computes a tile, but not what is computed.
template <bool kUp>
struct TileScheduler {
  const GemmArgs& args;
  int count;

  MOEOPT_DEVICE explicit TileScheduler(const GemmArgs& args_)
      : args(args_), count(ld_global_cg(args_.num_tiles) / blocks() * row_tiles<kUp>(args_)) {}
  MOEOPT_DEVICE int blocks() const { return args.paired ? 2 : 1; }
  MOEOPT_DEVICE int first() const { return block_index() / blocks(); }
  MOEOPT_DEVICE int second() const { return first() + grid_blocks() / blocks(); }
  MOEOPT_DEVICE int take() const { return 2 * (grid_blocks() / blocks()) + atom_add_global(args.tile_counter, 1); }
  // Work tile `index`, for block `rank` of the cluster.
  MOEOPT_DEVICE WorkTile at(int index, int rank) const {
    if (index >= count) return {-1, 0, 0, 0, 0};
    const int rows = row_tiles<kUp>(args), token_tile = index / rows * blocks() + rank;
    // From L2: the routing may run in a launch that overlaps this one.
    const Vec4 v = ld_global_cg_v4(args.tiles + token_tile);
    return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), index % rows, token_tile};
  }
};

// Passes work tiles from the weights warp to the other warps of a block, in shared memory. No barrier says that a slot
// is free again: the weights warp is at most the stages of the ring, plus two work tiles, ahead of the slowest warp.
constexpr int kQueueSlots = 16;
constexpr int kQueueBytes = kQueueSlots * (16 + 8) + 8;

struct WorkQueue {
  Vec4* slots;
  uint64_t* full;       // a barrier per slot
  uint64_t* math_done;  // barrier: the math warps have no work left
  int slot = 0;
  uint32_t parity = 0;

  MOEOPT_DEVICE explicit WorkQueue(unsigned char* shared)
      : slots(reinterpret_cast<Vec4*>(shared)), full(reinterpret_cast<uint64_t*>(shared + kQueueSlots * 16)),
        math_done(full + kQueueSlots) {}
  MOEOPT_DEVICE void advance() {
    if (++slot == kQueueSlots) {
      slot = 0;
      parity ^= 1u;
    }
  }
  MOEOPT_DEVICE WorkTile pop() {
    mbarrier_wait_parity(full + slot, parity);
    const WorkTile work = WorkTile::unpacked(slots[slot]);
    advance();
    return work;
  }
  // By one thread, for its own block. Without a cluster, st.async is an illegal instruction.
  MOEOPT_DEVICE void push(const WorkTile& work) {
    slots[slot] = work.packed();
    mbarrier_arrive_cluster(full + slot, 0);
  }
  // By one thread of the cluster, for block `rank`.
  MOEOPT_DEVICE void push_cluster(const WorkTile& work, int rank) {
    st_async_v4(slots + slot, full + slot, rank, work.packed());
  }
};

}  // namespace moeopt
