// The product of few tokens with a weight matrix ("skinny GEMM"): out[T, N] = x[T, K] w[N, K]^T, BF16, sums in FP32.
//
//   a block has N / blocks neighbouring rows of w, so that all blocks end together; a warp of it has a part of K
//   tile   16 rows: the rows of mma.m16n8k16; tokens are its columns
//   stage  the warp's part of K of a tile, or a segment of it: kPieces x 64 bytes of each row, a bulk copy per row
//   ring of stages of each warp ──► mma ──► sums[tile of a group][warp][token][row] ──► after a group of tiles the sum
//   of all warps in fixed order, bias ──► out
//
// Nothing writes weights while a model serves, so the first stages are asked for before griddepcontrol_wait: with a
// launch before this one that lets it start early, weights arrive while that one still runs.
//
// A lane of a quad reads bytes 16 t of every 64, which permutes K; tokens are read the same way. The parts of K depend
// on the number of warps alone: a token has the same bits whatever stands beside it, and on every GPU.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/skinny_gemm.h"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kSkinnyRows = 16;        // of a tile
constexpr int kSkinnyTokens = 8;       // at most: the columns of a product
constexpr int kSkinnyPieceBytes = 64;  // of a row: 4 lanes x 16 bytes
constexpr int kSkinnyWarps = 8;
constexpr int kSkinnyPieces = 8;  // of a row of a stage
constexpr int kSkinnyStages = 2;  // of each warp: both are in flight before the first is multiplied
constexpr int kSkinnyGroup = 4;   // tiles that are summed together
constexpr int kSkinnyChains = 4;  // of products that do not wait for one another
// Rows of a stage lie 64 bytes further apart than they are long: 8 lanes that read two rows then read all banks.
constexpr int kSkinnyPitch = (kSkinnyPieces + 1) * kSkinnyPieceBytes;
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

MOEOPT_PLAIN_KERNEL void MOEOPT_BOUNDS(kSkinnyWarps * 32, 1)
    skinny_gemm_kernel(const MOEOPT_GRID_CONSTANT SkinnyGemmArgs args) {
  constexpr int kPieces = kSkinnyPieces, kStages = kSkinnyStages, kWarps = kSkinnyWarps;
  MOEOPT_SHARED_BASE(shared);
  const int warp = thread_index() / 32, lane = thread_index() % 32, group = lane / 4, quad_lane = lane % 4;
  unsigned char* const ring = shared + warp * kStages * kSkinnyStageBytes;
  float* const all_sums = reinterpret_cast<float*>(shared + kSkinnyRingBytes);  // [tile of the group][warp][token][row]
  uint64_t* const full = reinterpret_cast<uint64_t*>(all_sums + kSkinnyGroup * kSkinnyTileSums) + warp * kStages;
  const int num_tokens = static_cast<int>(args.num_tokens);
  const int64_t row_bytes = args.depth * 2;
  const int all_pieces = static_cast<int>(args.depth / 32), first_piece = all_pieces * warp / kWarps;
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
    const int count = rows_of(loaded.tile), bytes = pieces_of(loaded.segment) * kSkinnyPieceBytes;
    const auto* const from = reinterpret_cast<const unsigned char*>(args.w) +
                             (first_row + loaded.tile * kSkinnyRows + lane) * row_bytes +
                             (first_piece + loaded.segment * kPieces) * kSkinnyPieceBytes;
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
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // after the wait: the next launch may load its weights, but not write

  SkinnyCursor at;
  Vec4 x[kPieces];
  float sums[kSkinnyChains][4] = {};
  for (int step = 0, stage = 0, parity = 0; step < total; ++step) {
    const int count = pieces_of(at.segment);
    if (segments > 1 || at.tile == 0) {
      const int k = (first_piece + at.segment * kPieces) * 32 + quad_lane * 8;
      MOEOPT_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        x[piece] = Vec4{0, 0, 0, 0};
        if (group < num_tokens && piece < count) {
          x[piece] = *reinterpret_cast<const Vec4*>(args.x + group * args.x_stride + k + piece * 32);
        }
      }
    }
    mbarrier_wait_parity(full + stage, static_cast<uint32_t>(parity));
    const unsigned char* const low = ring + stage * kSkinnyStageBytes + group * kSkinnyPitch + quad_lane * 16;
    MOEOPT_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece < count) {
        const Vec4 a = *reinterpret_cast<const Vec4*>(low + piece * kSkinnyPieceBytes);
        const Vec4 b = *reinterpret_cast<const Vec4*>(low + 8 * kSkinnyPitch + piece * kSkinnyPieceBytes);
        float (&chain)[4] = sums[piece % kSkinnyChains];
        mma_m16n8k16(chain, a.x, b.x, a.y, b.y, x[piece].x, x[piece].y);
        mma_m16n8k16(chain, a.z, b.z, a.w, b.w, x[piece].z, x[piece].w);
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
