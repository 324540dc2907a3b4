// The product of few tokens with a weight matrix ("skinny GEMM"): out[T, N] = x[T, K] w[N, K]^T, sums in FP32. Tokens
// and output are BF16; the weight is BF16, or E4M3 with FP32 scales, which becomes BF16 in registers, exactly.
//
//   a block has N / blocks neighbouring rows of w, so that all blocks end together; a warp of it has a part of K
//   tile   16 rows: the rows of mma.m16n8k16; tokens are its columns
//   stage  the warp's part of K of a tile, or a segment of it: kPieces x 64 bytes of each row, a bulk copy per row
//   ring of stages of each warp ──► mma ──► sums[tile of a group][warp][token][row] ──► after a group of tiles the sum
//   of all warps in fixed order, bias ──► out
//   scales of blocks apply to the FP32 sums of a piece, which lies in one block; those of rows to a warp's sums
//
// Nothing writes weights or scales while a model serves, so the first stages are asked for before griddepcontrol_wait:
// with a launch before this one that lets it start early, weights arrive while that one still runs.
//
// The parts of K depend on the number of warps alone: a token has the same bits whatever stands beside it, and on every
// GPU.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/row_pieces.cuh"
#include "moeopt/skinny_gemm.h"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kSkinnyRows = 16;   // of a tile
constexpr int kSkinnyTokens = 8;  // at most: the columns of a product
constexpr int kSkinnyWarps = 8;
constexpr int kSkinnyPieces = 8;  // of a row of a stage
constexpr int kSkinnyStages = 2;  // of each warp: both are in flight before the first is multiplied
constexpr int kSkinnyGroup = 4;   // tiles that are summed together
constexpr int kSkinnyChains = 4;  // of products that do not wait for one another
// Rows of a stage lie 64 bytes further apart than they are long: 8 lanes that read two rows then read all banks.
constexpr int kSkinnyPitch = (kSkinnyPieces + 1) * kPieceBytes;
constexpr int kSkinnyStageBytes = kSkinnyRows * kSkinnyPitch;
constexpr int kSkinnyRingBytes = kSkinnyWarps * kSkinnyStages * kSkinnyStageBytes;
constexpr int kSkinnyTileSums = kSkinnyWarps * kSkinnyTokens * kSkinnyRows;
constexpr int kSkinnySharedBytes =
    kSkinnyRingBytes + kSkinnyGroup * kSkinnyTileSums * 4 + kSkinnyWarps * kSkinnyStages * 8;

// Goes through the stages of a warp: all segments of a tile, then the next tile.
struct SkinnyCursor {
  int tile = 0, segment = 0;
  MOEOPT_DEVICE void advance(int segments) {
    if (++segment < segments) return;
    segment = 0;
    ++tile;
  }
};

template <SkinnyWeights kWeights>
constexpr int kSkinnyBits = kWeights == SkinnyWeights::kBf16 ? 16 : 8;

template <SkinnyWeights kWeights>
constexpr int kSkinnyPieceColumns = kPieceBytes * 8 / kSkinnyBits<kWeights>;  // 32, or half of a block of scales

// Scales of a lane's rows g and g + 8 of a tile: of each piece of a stage, or of the rows.
template <SkinnyWeights kWeights>
struct SkinnyScales {
  static constexpr bool kOfPieces = kWeights == SkinnyWeights::kE4M3Blocks;
  static constexpr int kCount = kOfPieces ? kSkinnyPieces : 1;
  float of[2][kCount];

  // `row`: row g, which may lie beyond the last one, as may row g + 8; `count` pieces from `first_piece` on.
  MOEOPT_DEVICE void load(const SkinnyGemmArgs& args, int64_t row, int first_piece, int count) {
    if constexpr (kWeights != SkinnyWeights::kBf16) {
      MOEOPT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int64_t wanted = row + 8 * half, last = args.num_rows - 1, at = wanted < last ? wanted : last;
        const float* const from = args.scale + (kOfPieces ? at / 128 : at) * args.scale_row_stride;
        MOEOPT_UNROLL
        for (int piece = 0; piece < kCount; ++piece) {
          if (kOfPieces && piece >= count) continue;
          of[half][piece] = ld_global_nc(from + (kOfPieces ? (first_piece + piece) / 2 * args.scale_depth_stride : 0));
        }
      }
    }
  }
};

template <SkinnyWeights kWeights>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kSkinnyWarps * 32, 1)
    skinny_gemm_kernel(const MOEOPT_GRID_CONSTANT SkinnyGemmArgs args) {
  constexpr int kBits = kSkinnyBits<kWeights>, kColumns = kSkinnyPieceColumns<kWeights>;
  constexpr int kPieces = kSkinnyPieces, kStages = kSkinnyStages, kWarps = kSkinnyWarps;
  MOEOPT_SHARED_BASE(shared);
  const int warp = thread_index() / 32, lane = thread_index() % 32, group = lane / 4, quad_lane = lane % 4;
  unsigned char* const ring = shared + warp * kStages * kSkinnyStageBytes;
  float* const all_sums = reinterpret_cast<float*>(shared + kSkinnyRingBytes);  // [tile of the group][warp][token][row]
  uint64_t* const full = reinterpret_cast<uint64_t*>(all_sums + kSkinnyGroup * kSkinnyTileSums) + warp * kStages;
  const int num_tokens = static_cast<int>(args.num_tokens);
  const int64_t row_bytes = args.depth * kBits / 8;
  const int all_pieces = static_cast<int>(args.depth / kColumns), first_piece = all_pieces * warp / kWarps;
  const int pieces = all_pieces * (warp + 1) / kWarps - first_piece;  // of this warp
  const int segments = pieces > kPieces ? ceil_div(pieces, kPieces) : 1;
  const int64_t first_row = args.num_rows * block_index() / grid_blocks();
  const int rows = static_cast<int>(args.num_rows * (block_index() + 1) / grid_blocks() - first_row);
  const int tiles = ceil_div(rows, kSkinnyRows), total = tiles * segments;
  const auto pieces_of = [&](int segment) {
    const int left = pieces - segment * kPieces;
    return left < kPieces ? left : kPieces;
  };
  const auto rows_of = [&](int tile) {
    const int left = rows - tile * kSkinnyRows;
    return left < kSkinnyRows ? left : kSkinnyRows;
  };

  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(full + stage, 1);
    fence_mbarrier_init();
  }
  SkinnyCursor loaded;
  int left_to_load = total;
  const auto load = [&](int stage) {
    if (left_to_load == 0) return;
    --left_to_load;
    const int count = rows_of(loaded.tile), bytes = pieces_of(loaded.segment) * kPieceBytes;
    const auto* const from = reinterpret_cast<const unsigned char*>(args.w) +
                             (first_row + loaded.tile * kSkinnyRows + lane) * row_bytes +
                             (first_piece + loaded.segment * kPieces) * kPieceBytes;
    if (lane == 0) mbarrier_arrive_expect_tx(full + stage, static_cast<uint32_t>(count * bytes));
    bar_warp_sync();
    if (lane < count && bytes > 0) {
      bulk_load_evict_first(ring + stage * kSkinnyStageBytes + lane * kSkinnyPitch, from, bytes, full + stage);
    }
    loaded.advance(segments);
  };
  bar_warp_sync();
  MOEOPT_UNROLL
  for (int stage = 0; stage < kStages; ++stage) load(stage);
  SkinnyCursor at;
  SkinnyScales<kWeights> scales;
  const auto load_scales = [&] {
    scales.load(args, first_row + at.tile * kSkinnyRows + group, first_piece + at.segment * kPieces,
                pieces_of(at.segment));
  };
  load_scales();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // after the wait: the next launch may load its weights, but not write

  PieceTokens<kBits> x[kPieces];
  float sums[kSkinnyChains][4] = {};
  for (int step = 0, stage = 0, parity = 0; step < total; ++step) {
    const int count = pieces_of(at.segment);
    if (segments > 1 || at.tile == 0) {
      const int k = (first_piece + at.segment * kPieces) * kColumns + quad_lane * (kColumns / 4);
      MOEOPT_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        MOEOPT_UNROLL
        for (int part = 0; part < 16 / kBits; ++part) {
          x[piece].part[part] = Vec4{0, 0, 0, 0};
          if (group < num_tokens && piece < count) {
            x[piece].part[part] =
                *reinterpret_cast<const Vec4*>(args.x + group * args.x_stride + k + piece * kColumns + part * 8);
          }
        }
      }
    }
    if (step > 0) load_scales();
    mbarrier_wait_parity(full + stage, static_cast<uint32_t>(parity));
    const unsigned char* const low = ring + stage * kSkinnyStageBytes + group * kSkinnyPitch + quad_lane * 16;
    MOEOPT_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece < count) {
        const Vec4 a = *reinterpret_cast<const Vec4*>(low + piece * kPieceBytes);
        const Vec4 b = *reinterpret_cast<const Vec4*>(low + 8 * kSkinnyPitch + piece * kPieceBytes);
        float (&chain)[4] = sums[piece % kSkinnyChains];
        if constexpr (kWeights == SkinnyWeights::kE4M3Blocks) {
          float of_block[4] = {};
          multiply_piece<kBits>(a, b, x[piece], of_block);
          MOEOPT_UNROLL
          for (int r = 0; r < 4; ++r) chain[r] += of_block[r] * scales.of[r / 2][piece];
        } else {
          multiply_piece<kBits>(a, b, x[piece], chain);
        }
      }
    }
    if (left_to_load > 0) {
      fence_proxy_async();  // what was read here is written by the copy engine next
      bar_warp_sync();
      load(stage);
    }
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    const int tile = at.tile, of_group = tile % kSkinnyGroup;
    at.advance(segments);
    if (at.tile == tile) continue;

    MOEOPT_UNROLL
    for (int r = 0; r < 4; ++r) {
      const int token = quad_lane * 2 + r % 2, row = group + 8 * (r / 2);
      float sum = sums[0][r];
      MOEOPT_UNROLL
      for (int chain = 1; chain < kSkinnyChains; ++chain) sum += sums[chain][r];
      if constexpr (kWeights == SkinnyWeights::kE4M3Rows) sum *= scales.of[r / 2][0];
      all_sums[of_group * kSkinnyTileSums + (warp * kSkinnyTokens + token) * kSkinnyRows + row] = sum;
      MOEOPT_UNROLL
      for (int chain = 0; chain < kSkinnyChains; ++chain) sums[chain][r] = 0.0f;
    }
    if (of_group + 1 < kSkinnyGroup && at.tile < tiles) continue;
    bar_sync();
    const int first_tile = tile - of_group, to_sum = (of_group + 1) * num_tokens * kSkinnyRows;
    for (int i = thread_index(); i < to_sum; i += kWarps * 32) {
      const int row = i % kSkinnyRows, token = i / kSkinnyRows % num_tokens, t = i / kSkinnyRows / num_tokens;
      const float* const of_tile = all_sums + t * kSkinnyTileSums + token * kSkinnyRows + row;
      float sum = 0;
      MOEOPT_UNROLL
      for (int w = 0; w < kWarps; ++w) sum += of_tile[w * kSkinnyTokens * kSkinnyRows];
      if (row >= rows_of(first_tile + t)) continue;
      const int64_t to = first_row + (first_tile + t) * kSkinnyRows + row;
      if (args.bias != nullptr) sum += float_from_bits(static_cast<uint32_t>(args.bias[to]) << 16);
      args.out[token * args.out_stride + to] = static_cast<uint16_t>(cvt_bf16x2_f32(sum, 0.0f));
    }
    if (at.tile < tiles) bar_sync();  // the next group's sums come into the same place
  }
}

}  // namespace moeopt
