// The product of few tokens with a weight matrix ("skinny GEMM"): out[T, N] = x[T, K] w[N, K]^T, BF16, sums in FP32.
//
//   a block has N / blocks neighbouring rows of w, so that all blocks end together; a warp of it has a part of K
//   tile   16 rows: the rows of mma.m16n8k16; tokens are its columns, 8 or twice 8
//   stage  the warp's part of K of a tile, or a segment of it: kPieces x 64 bytes of each row
//   ring of stages (registers or shared memory) ──► mma ──► sums[warp][token][row] ──► sum of all warps in fixed order,
//   bias ──► out
//
// Nothing writes weights while a model serves, so the first stages are loaded before griddepcontrol_wait: with a launch
// before this one that lets it start early, weights arrive while that one still runs. The bytes that are in flight set
// the time: the variants differ in where they wait.
//
// A lane of a quad reads bytes 16 t of every 64, which permutes K; tokens are read the same way. The parts of K depend
// on the number of warps alone: a token has the same bits whatever stands beside it, and on every GPU.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/skinny_gemm.h"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kSkinnyRows = 16;        // of a tile
constexpr int kSkinnyPieceBytes = 64;  // of a row: 4 lanes x 16 bytes
constexpr int kSkinnyTokens = 16;      // at most
constexpr int kPrefetchBytes = 4096;   // per instruction

// What is compiled: the shape of a block of `kBuffer` and `kWarps`.
template <SkinnyBuffer kBuffer, int kWarps, int kTokenTiles>
struct SkinnyShape {
  static constexpr bool kIsBulk = kBuffer == SkinnyBuffer::kBulk, kIsRegisters = kBuffer == SkinnyBuffer::kRegisters;
  static constexpr bool kFew = kTokenTiles == 1;
  static constexpr int kPieces = kIsBulk ? 64 / kWarps : kIsRegisters && !kFew ? 2 : 4;  // of a stage
  static constexpr int kStages = (kIsRegisters && kFew) || (kIsBulk && !kFew) ? 2 : 3;   // as many as there is room for
  static constexpr int kBlocks = !kIsBulk && kWarps == 8 ? 2 : 1;                        // per multiprocessor
  // Rows of a bulk stage lie 64 bytes further apart than they are long: 8 lanes that read two rows then read all banks.
  static constexpr int kPitch = kPieces * kSkinnyPieceBytes + (kIsBulk ? 64 : 0);
  static constexpr int kStageBytes = kIsRegisters ? 0 : kSkinnyRows * kPitch;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kTileSums = kWarps * kTokenTiles * 8 * kSkinnyRows;
  static constexpr int kBarrierBytes = kIsBulk ? kWarps * kStages * 8 : 0;
  static constexpr int kSharedBytes = kRingBytes + 2 * kTileSums * 4 + kBarrierBytes;
};

// A warp's rows and part of K of one stage.
struct SkinnyPart {
  const unsigned char* first;  // of its first row
  int64_t row_bytes;           // between rows
  int rows, pieces;
};

// --- rings -------------------------------------------------------------------------------------------------------

template <SkinnyBuffer kBuffer, typename Shape>
struct SkinnyRing;

template <typename Shape>
struct SkinnyRing<SkinnyBuffer::kRegisters, Shape> {
  Vec4 stages[Shape::kStages][Shape::kPieces][2];

  MOEOPT_DEVICE void start(unsigned char*, uint64_t*) {}
  MOEOPT_DEVICE void load(int stage, const SkinnyPart& part) {
    const int group = thread_index() % 32 / 4;
    const unsigned char* const from = part.first + group * part.row_bytes + thread_index() % 4 * 16;
    MOEOPT_UNROLL
    for (int piece = 0; piece < Shape::kPieces; ++piece) {
      MOEOPT_UNROLL
      for (int half = 0; half < 2; ++half) {
        stages[stage][piece][half] = Vec4{0, 0, 0, 0};
        if (piece < part.pieces && group + 8 * half < part.rows) {
          stages[stage][piece][half] =
              ld_global_nc_no_allocate_v4(from + 8 * half * part.row_bytes + piece * kSkinnyPieceBytes);
        }
      }
    }
  }
  MOEOPT_DEVICE void load_nothing() {}
  MOEOPT_DEVICE void wait(int, int) {}
  MOEOPT_DEVICE Vec4 read(int stage, int piece, int half) const { return stages[stage][piece][half]; }
  MOEOPT_DEVICE void release() {}
};

// A lane copies what it reads: it waits for nobody else, and a stage is free once it has read it.
template <typename Shape>
struct SkinnyRing<SkinnyBuffer::kShared, Shape> {
  unsigned char* lane_base;

  MOEOPT_DEVICE void start(unsigned char* ring, uint64_t*) {
    lane_base = ring + thread_index() / 32 * Shape::kStages * Shape::kStageBytes + thread_index() % 32 * 16;
  }
  MOEOPT_DEVICE unsigned char* place(int stage, int piece, int half) const {
    return lane_base + stage * Shape::kStageBytes + (piece * 2 + half) * 512;
  }
  MOEOPT_DEVICE void load(int stage, const SkinnyPart& part) {
    const int group = thread_index() % 32 / 4;
    const unsigned char* const from = part.first + group * part.row_bytes + thread_index() % 4 * 16;
    MOEOPT_UNROLL
    for (int piece = 0; piece < Shape::kPieces; ++piece) {
      MOEOPT_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (piece < part.pieces && group + 8 * half < part.rows) {
          cp_async_16(place(stage, piece, half), from + 8 * half * part.row_bytes + piece * kSkinnyPieceBytes, true);
        }
      }
    }
    cp_async_commit_group();
  }
  MOEOPT_DEVICE void load_nothing() { cp_async_commit_group(); }
  MOEOPT_DEVICE void wait(int, int) { cp_async_wait_group<Shape::kStages - 1>(); }
  MOEOPT_DEVICE Vec4 read(int stage, int piece, int half) const {
    return *reinterpret_cast<const Vec4*>(place(stage, piece, half));
  }
  MOEOPT_DEVICE void release() {}
};

template <typename Shape>
struct SkinnyRing<SkinnyBuffer::kBulk, Shape> {
  unsigned char* warp_base;
  uint64_t* full;  // of this warp's stages

  MOEOPT_DEVICE void start(unsigned char* ring, uint64_t* barriers) {
    const int warp = thread_index() / 32;
    warp_base = ring + warp * Shape::kStages * Shape::kStageBytes;
    full = barriers + warp * Shape::kStages;
    if (thread_index() % 32 == 0) {
      for (int stage = 0; stage < Shape::kStages; ++stage) mbarrier_init(full + stage, 1);
      fence_mbarrier_init();
    }
    bar_warp_sync();
  }
  MOEOPT_DEVICE void load(int stage, const SkinnyPart& part) {
    const int lane = thread_index() % 32, bytes = part.pieces * kSkinnyPieceBytes;
    if (lane == 0) mbarrier_arrive_expect_tx(full + stage, static_cast<uint32_t>(part.rows * bytes));
    bar_warp_sync();
    if (lane < part.rows && bytes > 0) {
      bulk_load_evict_first(warp_base + stage * Shape::kStageBytes + lane * Shape::kPitch,
                            part.first + lane * part.row_bytes, bytes, full + stage);
    }
  }
  MOEOPT_DEVICE void load_nothing() {}
  MOEOPT_DEVICE void wait(int stage, int round) { mbarrier_wait_parity(full + stage, round % 2); }
  MOEOPT_DEVICE Vec4 read(int stage, int piece, int half) const {
    const int row = thread_index() % 32 / 4 + 8 * half;
    return *reinterpret_cast<const Vec4*>(warp_base + stage * Shape::kStageBytes + row * Shape::kPitch +
                                          piece * kSkinnyPieceBytes + thread_index() % 4 * 16);
  }
  MOEOPT_DEVICE void release() {
    fence_proxy_async();  // what was read here is written by the copy engine next
    bar_warp_sync();
  }
};

// --- kernel ------------------------------------------------------------------------------------------------------

// Goes through the stages of a warp: all segments of a tile, then the next tile.
struct SkinnyCursor {
  int tile = 0, segment = 0;
  MOEOPT_DEVICE void advance(int segments) {
    if (++segment < segments) return;
    segment = 0;
    ++tile;
  }
};

template <SkinnyBuffer kBuffer, int kWarps, int kTokenTiles>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kWarps * 32, (SkinnyShape<kBuffer, kWarps, kTokenTiles>::kBlocks))
    skinny_gemm_kernel(const MOEOPT_GRID_CONSTANT SkinnyGemmArgs args) {
  using Shape = SkinnyShape<kBuffer, kWarps, kTokenTiles>;
  constexpr int kPieces = Shape::kPieces, kStages = Shape::kStages;
  MOEOPT_SHARED_BASE(shared);
  float* const all_sums = reinterpret_cast<float*>(shared + Shape::kRingBytes);  // twice [warp][token][row]
  const int warp = thread_index() / 32, group = thread_index() % 32 / 4, quad_lane = thread_index() % 4;
  const int num_tokens = static_cast<int>(args.num_tokens);
  const int64_t row_bytes = args.depth * 2;
  const int all_pieces = static_cast<int>(args.depth / 32), first_piece = all_pieces * warp / kWarps;
  const int pieces = all_pieces * (warp + 1) / kWarps - first_piece;  // of this warp
  const int segments = pieces > kPieces ? ceil_div(pieces, kPieces) : 1;
  const int64_t first_row = args.num_rows * block_index() / grid_blocks();
  const int rows = static_cast<int>(args.num_rows * (block_index() + 1) / grid_blocks() - first_row);
  const int total = ceil_div(rows, kSkinnyRows) * segments;
  const auto pieces_of = [&](int segment) {
    const int left = pieces - segment * kPieces;
    return left < kPieces ? left : kPieces;
  };
  const auto rows_of = [&](int tile) {
    const int left = rows - tile * kSkinnyRows;
    return left < kSkinnyRows ? left : kSkinnyRows;
  };

  SkinnyRing<kBuffer, Shape> ring;
  ring.start(shared, reinterpret_cast<uint64_t*>(all_sums + 2 * Shape::kTileSums));
  SkinnyCursor loaded;
  int left_to_load = total;
  const auto load = [&](int stage) {
    if (left_to_load == 0) return ring.load_nothing();
    --left_to_load;
    const auto* const from = reinterpret_cast<const unsigned char*>(args.w) +
                             (first_row + loaded.tile * kSkinnyRows) * row_bytes +
                             (first_piece + loaded.segment * kPieces) * kSkinnyPieceBytes;
    ring.load(stage, {from, row_bytes, rows_of(loaded.tile), pieces_of(loaded.segment)});
    loaded.advance(segments);
  };
  MOEOPT_UNROLL
  for (int stage = 0; stage < kStages; ++stage) load(stage);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // after the wait: the next launch may load its weights, but not write

  SkinnyCursor at;
  Vec4 x[kTokenTiles][kPieces];
  float sums[kTokenTiles][2][4] = {};  // of even and of odd pieces: two chains of products
  for (int first = 0, round = 0; first < total; first += kStages, ++round) {
    MOEOPT_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      if (first + stage >= total) break;
      const int count = pieces_of(at.segment);
      if (segments > 1 || at.tile == 0) {
        const int k = (first_piece + at.segment * kPieces) * 32 + quad_lane * 8;
        MOEOPT_UNROLL
        for (int i = 0; i < kTokenTiles; ++i) {
          const int token = i * 8 + group;
          MOEOPT_UNROLL
          for (int piece = 0; piece < kPieces; ++piece) {
            x[i][piece] = Vec4{0, 0, 0, 0};
            if (token < num_tokens && piece < count) {
              x[i][piece] = *reinterpret_cast<const Vec4*>(args.x + token * args.x_stride + k + piece * 32);
            }
          }
        }
      }
      ring.wait(stage, round);
      MOEOPT_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        if (piece < count) {
          const Vec4 low = ring.read(stage, piece, 0), high = ring.read(stage, piece, 1);
          MOEOPT_UNROLL
          for (int i = 0; i < kTokenTiles; ++i) {
            const Vec4& tokens = x[i][piece];
            mma_m16n8k16(sums[i][piece % 2], low.x, high.x, low.y, high.y, tokens.x, tokens.y);
            mma_m16n8k16(sums[i][piece % 2], low.z, high.z, low.w, high.w, tokens.z, tokens.w);
          }
        }
      }
      ring.release();
      load(stage);
      const int tile = at.tile;
      at.advance(segments);
      if (at.tile == tile) continue;

      // The tile before last was summed before this one's barrier, so two places are enough.
      float* const tile_sums = all_sums + tile % 2 * Shape::kTileSums;
      MOEOPT_UNROLL
      for (int i = 0; i < kTokenTiles; ++i) {
        MOEOPT_UNROLL
        for (int r = 0; r < 4; ++r) {
          const int token = i * 8 + quad_lane * 2 + r % 2, row = group + 8 * (r / 2);
          tile_sums[(warp * kTokenTiles * 8 + token) * kSkinnyRows + row] = sums[i][0][r] + sums[i][1][r];
          sums[i][0][r] = sums[i][1][r] = 0.0f;
        }
      }
      bar_sync();
      for (int i = thread_index(); i < num_tokens * kSkinnyRows; i += kWarps * 32) {
        const int row = i % kSkinnyRows, token = i / kSkinnyRows;
        float sum = 0;
        MOEOPT_UNROLL
        for (int w = 0; w < kWarps; ++w) sum += tile_sums[w * kTokenTiles * 8 * kSkinnyRows + i];
        if (row >= rows_of(tile)) continue;
        const int64_t to = first_row + tile * kSkinnyRows + row;
        if (args.bias != nullptr) sum += float_from_bits(static_cast<uint32_t>(args.bias[to]) << 16);
        args.out[token * args.out_stride + to] = static_cast<uint16_t>(cvt_bf16x2_f32(sum, 0.0f));
      }
    }
  }
  const int64_t apart = static_cast<int64_t>(grid_blocks()) * kPrefetchBytes;
  int64_t at_byte = static_cast<int64_t>(thread_index()) * apart + static_cast<int64_t>(block_index()) * kPrefetchBytes;
  for (; at_byte < args.prefetch_bytes; at_byte += block_threads() * apart) {
    const int64_t left = args.prefetch_bytes - at_byte;
    bulk_prefetch_l2(static_cast<const unsigned char*>(args.prefetch) + at_byte,
                     static_cast<uint32_t>(left < kPrefetchBytes ? left : kPrefetchBytes));
  }
}

}  // namespace moeopt
