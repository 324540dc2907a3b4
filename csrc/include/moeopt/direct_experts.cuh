// Direct kernels, for at most 64 tokens: weights go from global memory straight into mma registers.
//
//   slot = up to 8 pairs of one expert: the 8 columns of mma.m16n8k16, weights are its 16 rows (direct_routing.cuh)
//
//   direct_up_kernel    persistent; tile of 8 gate + 8 up rows (BF16), or twice that (FP8, MXFP4), of one expert x a
//                         slot, an eighth of K per warp, in steps of 128 or (wide, BF16) 256 bytes of a row
//                         16-byte loads ──► A registers of mma ──► sum of 8 warps ──► SwiGLU ──► h
//                         the next tile's first weights are loaded before this tile is summed
//   direct_down_kernel  persistent; 16 rows of the output, every slot; batches of (slot, K) cut evenly over 16 warps
//                         w2 ──► registers, then wait for h (programmatic dependent launch) ──► mma
//                         per slot: sums[warp][token] += routing weight x partial;  sum of 16 warps ──► out
//
// Blocks of the second kernel are independent: no counters, no partial outputs in global memory. A slot holds a token
// at most once, so no two lanes add to the same sum. The order of additions is fixed, so every run gives the same bits.
//
// A lane reads 16 bytes of a row (lane t of a quad: bytes 16t of every 64), which permutes K. Tokens are read the same
// way, so both operands have the same permutation. 16 bytes of MXFP4 are one group: one exponent. Those of INT4 lie in
// one group, whose scale is part of the BF16 weights (int4.cuh).
#pragma once

#include <type_traits>

#include "moeopt/device.cuh"
#include "moeopt/direct_routing.cuh"
#include "moeopt/int4.cuh"
#include "moeopt/mxfp4.cuh"
#include "moeopt/row_pieces.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

struct DirectArgs {
  FusedExpertsArgs moe;
  uint16_t* h;  // BF16 [T k, I], a row per pair
};

// INT4 has fields of its own, so that the other kernels stay the instructions that were measured.
struct DirectInt4Args {
  FusedExpertsArgs moe;
  uint16_t* h;
  Int4Factors w13, w2;
};
template <bool kInt4>
using DirectArgsOf = std::conditional_t<kInt4, DirectInt4Args, DirectArgs>;

constexpr int kDirectUpWarps = 8;
constexpr int kDirectDownWarps = 16;
constexpr int kDirectRows = 16;        // of w2 and of the output, per block of the second kernel
constexpr int kDirectStepBytes = 128;  // of a row of w2 per step: twice 4 lanes x 16 bytes; FP8: one block of scales
constexpr int kDirectUpSumBytes = kDirectUpWarps * 2 * 128 * 4;
constexpr int kDirectDownSumBytesPerToken = kDirectDownWarps * kDirectRows * 4;
// After the routing tables: first scratch of the routing, later the sums of the warps.
constexpr int kDirectScratchOffset = (static_cast<int>(sizeof(DirectRouting)) + 15) / 16 * 16;

// Bytes between two weights that lie `elements` apart. Strides of MXFP4 count the bytes of two weights.
template <int kWeightBits>
constexpr int kStrideBytes = kWeightBits == 16 ? 2 : 1;

// Gate rows of a tile, and as many up rows. 8: gates are rows 0 to 7 of one product, ups rows 8 to 15; small tiles
// divide evenly. Fewer bits take 16 in two products: a tile reads its tokens once, and they are more bytes than its
// weights.
template <int kWeightBits>
constexpr int kDirectUpRows = kWeightBits == 16 ? 8 : 16;

// Pieces of 64 bytes (4 lanes x 16) of a weight row per step of the first kernel. Wide steps take more registers, so
// fewer blocks fit: for few tiles, which divide better among fewer blocks.
constexpr int kDirectNarrow = 2;
constexpr int kDirectWide = 4;

// Blocks per multiprocessor, as many as the registers allow.
template <int kWeightBits, int kPieces>
constexpr int kDirectUpBlocks = kWeightBits == 16 && kPieces == kDirectNarrow ? 4 : 2;

// Steps of w2 that a warp loads at once, of one slot: longer reads along a row are faster.
template <int kWeightBits>
constexpr int kDirectDownBatch = kWeightBits == 16 ? 3 : 2;

// Loads 16 bytes per lane of every 64-byte piece of a step; zeros where `inside` is false or past the row's end.
template <int kPieces, typename Load>
MOEOPT_DEVICE void load_step(Vec4 (&to)[kPieces], int column, int row_bytes, bool inside, Load load) {
  MOEOPT_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    const int byte = column + piece * 64 + thread_index() % 4 * 16;
    to[piece] = Vec4{0, 0, 0, 0};
    if (inside && byte < row_bytes) to[piece] = load(byte);
  }
}

// Loads the exponents of those 16 bytes; 0, which is a finite one, where no weights are.
template <int kPieces>
MOEOPT_DEVICE void load_exponents(uint32_t (&to)[kPieces], const uint8_t* row, int column, int row_bytes, bool inside) {
  MOEOPT_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    const int byte = column + piece * 64 + thread_index() % 4 * 16;
    to[piece] = 0;
    if (inside && byte < row_bytes) to[piece] = ld_global_nc(row + byte / 16);
  }
}

// Scales and zero points of INT4.
template <int kPieces>
struct DirectInt4 {
  uint32_t scale[kPieces], zero[kPieces];

  // `row`: the group with which the weight row begins.
  MOEOPT_DEVICE void load(const Int4Factors& factors, uint32_t row, int column, int row_bytes, bool inside) {
    MOEOPT_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      const int byte = column + piece * 64 + thread_index() % 4 * 16;
      scale[piece] = 0;  // a finite one, where no weights are
      zero[piece] = kInt4SymmetricZeroPoint;
      const bool valid = inside && byte < row_bytes;
      const uint32_t group = row + static_cast<uint32_t>(byte * 2 >> factors.shift);
      if (valid) scale[piece] = ld_global_nc(factors.scale + group);
      if (valid && factors.zero != nullptr) zero[piece] = ld_global_nc(factors.zero + group);
    }
  }
};

template <int kWeightBits, typename Load>
MOEOPT_DEVICE PieceTokens<kWeightBits> load_tokens(int column, int row_bytes, bool inside, Load load) {
  PieceTokens<kWeightBits> tokens;
  const int byte = column + thread_index() % 4 * 16;
  MOEOPT_UNROLL
  for (int v = 0; v < 16 / kWeightBits; ++v) {
    tokens.part[v] = Vec4{0, 0, 0, 0};
    if (inside && byte < row_bytes) tokens.part[v] = load(byte * 8 / kWeightBits + v * 8);
  }
  return tokens;
}

// As in row_pieces.cuh for MXFP4, scaled; `low`, `high`: the exponents of a lane's 32 weights of rows g and g + 8.
MOEOPT_DEVICE void multiply_piece(const Vec4& low, const Vec4& high, uint32_t low_exponent, uint32_t high_exponent,
                                  const PieceTokens<4>& tokens, float (&sums)[4]) {
  const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
  const uint32_t low_factor = mxfp4_factor_of_byte(low_exponent), high_factor = mxfp4_factor_of_byte(high_exponent);
  MOEOPT_UNROLL
  for (int i = 0; i < 4; ++i) {
    uint32_t a[4], b[4], x[4];
    bf16_of_e2m1(lows[i], low_factor, a);
    bf16_of_e2m1(highs[i], high_factor, b);
    order_as_e2m1(tokens.part[i], x);
    mma_m16n8k16(sums, a[0], b[0], a[1], b[1], x[0], x[1]);
    mma_m16n8k16(sums, a[2], b[2], a[3], b[3], x[2], x[3]);
  }
}

// The same for INT4; `low`, `high`: what a lane's 32 weights of rows g and g + 8 have.
template <int kPieces>
MOEOPT_DEVICE void multiply_piece(const Vec4& low, const Vec4& high, const DirectInt4<kPieces>& of_low,
                                  const DirectInt4<kPieces>& of_high, int piece, const PieceTokens<4>& tokens,
                                  float (&sums)[4]) {
  const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
  const uint32_t low_factor = int4_factor(of_low.scale[piece], of_low.zero[piece]);
  const uint32_t high_factor = int4_factor(of_high.scale[piece], of_high.zero[piece]);
  MOEOPT_UNROLL
  for (int i = 0; i < 4; ++i) {
    uint32_t a[4], b[4], x[4];
    bf16_of_int4(lows[i], low_factor, a);
    bf16_of_int4(highs[i], high_factor, b);
    order_as_e2m1(tokens.part[i], x);
    mma_m16n8k16(sums, a[0], b[0], a[1], b[1], x[0], x[1]);
    mma_m16n8k16(sums, a[2], b[2], a[3], b[3], x[2], x[3]);
  }
}

MOEOPT_DEVICE void add_scaled_to(float (&sums)[4], float scale, const float (&partial)[4]) {
  MOEOPT_UNROLL
  for (int r = 0; r < 4; ++r) sums[r] += scale * partial[r];
}

// --- gate and up -------------------------------------------------------------------------------------------------

// This lane's part of a tile: gate rows g (and g + 8) and their up rows, steps [step, end).
template <int kWeightBits, int kPieces, bool kInt4>
struct DirectTile {
  const unsigned char* gate;
  const float* gate_scale;        // of the first block along K; null: no block scales
  const uint8_t* gate_exponents;  // MXFP4, of this lane's first gate row
  uint32_t gate_group;            // INT4, the first of that row
  int64_t up_offset, eight_rows;
  int up_scale_offset, up_row, eighth_row, step, end, slot, expert, first;

  MOEOPT_DEVICE void locate(const DirectArgsOf<kInt4>& args, const DirectRouting& routing, int g) {
    const FusedExpertsArgs& moe = args.moe;
    const int width = static_cast<int>(moe.intermediate_size), tiles = width / kDirectUpRows<kWeightBits>;
    slot = g / tiles;
    first = (g - slot * tiles) * kDirectUpRows<kWeightBits>;
    expert = routing.slot_expert[slot];
    const int64_t stride = moe.w13_row_stride * kStrideBytes<kWeightBits>;
    const int row = w13_row(moe.activation, width, first + thread_index() % 32 / 4, 0);
    gate = static_cast<const unsigned char*>(moe.w13) + expert * moe.w13_expert_stride * kStrideBytes<kWeightBits> +
           row * stride;
    up_offset = w13_row(moe.activation, width, 0, 1) * stride;
    eight_rows = w13_row(moe.activation, width, 8, 0) * stride;
    if constexpr (kWeightBits == 4) {
      up_row = w13_row(moe.activation, width, 0, 1);
      eighth_row = w13_row(moe.activation, width, 8, 0);
    }
    if constexpr (kInt4) {
      gate_group =
          static_cast<uint32_t>((expert * 2 * width + row) * (static_cast<int>(moe.hidden_size) >> args.w13.shift));
    } else if constexpr (kWeightBits == 4) {
      const int64_t groups = moe.hidden_size / kScaleGroup;
      gate_exponents = moe.w13_exponents + (static_cast<int64_t>(expert) * 2 * width + row) * groups;
    }
    gate_scale = nullptr;
    if (kWeightBits == 8 && moe.scale_kind == ScaleKind::kBlock128) {  // 16 rows of a tile lie in one block
      const int columns = ceil_div(static_cast<int>(moe.hidden_size), 128), blocks = ceil_div(2 * width, 128);
      const int gate_block = w13_row(moe.activation, width, first, 0) / 128;
      gate_scale = moe.w13_scale + (static_cast<int64_t>(expert) * blocks + gate_block) * columns;
      up_scale_offset = (w13_row(moe.activation, width, first, 1) / 128 - gate_block) * columns;
    }
    const int steps = ceil_div(static_cast<int>(moe.hidden_size) * kWeightBits / 8, kPieces * 64);
    const int share = ceil_div(steps, kDirectUpWarps);
    step = thread_index() / 32 * share;
    end = step + share < steps ? step + share : steps;
  }
};

template <int kWeightBits, int kPieces, bool kInt4>
struct DirectUpStep {
  static constexpr int kProducts = kDirectUpRows<kWeightBits> / 8;
  static_assert(kWeightBits == 16 || kProducts == 2, "a scale is added to the sums of one product: of gates or of ups");
  static_assert(kWeightBits == 16 || kPieces == 2, "a step has one scale: 128 bytes");
  Vec4 rows[2][kProducts][kPieces];           // [gate, up][row g or g + 8][piece]
  float scale[2];                             // FP8
  uint32_t exponents[2][kProducts][kPieces];  // MXFP4
  DirectInt4<kPieces> factors[2][kProducts];  // INT4
};

// Loads one step; zeros past the end.
template <int kWeightBits, int kPieces, bool kInt4>
MOEOPT_DEVICE void load_up(const DirectArgsOf<kInt4>& args, const DirectTile<kWeightBits, kPieces, kInt4>& tile,
                           DirectUpStep<kWeightBits, kPieces, kInt4>& weights) {
  const FusedExpertsArgs& moe = args.moe;
  const int column = tile.step * kPieces * 64, row_bytes = static_cast<int>(moe.hidden_size) * kWeightBits / 8;
  const bool inside = tile.step < tile.end;
  MOEOPT_UNROLL
  for (int a = 0; a < 2; ++a) {
    weights.scale[a] = 1.0f;
    if (kWeightBits == 8 && tile.gate_scale != nullptr && inside) {
      weights.scale[a] = ld_global_nc(tile.gate_scale + a * tile.up_scale_offset + tile.step);
    }
    MOEOPT_UNROLL
    for (int r = 0; r < DirectUpStep<kWeightBits, kPieces, kInt4>::kProducts; ++r) {
      const unsigned char* row = tile.gate + a * tile.up_offset + r * tile.eight_rows;
      load_step(weights.rows[a][r], column, row_bytes, inside,
                [&](int byte) { return ld_global_nc_no_allocate_v4(row + byte); });
      if constexpr (kInt4) {
        const int groups = static_cast<int>(moe.hidden_size) >> args.w13.shift;
        weights.factors[a][r].load(
            args.w13, tile.gate_group + static_cast<uint32_t>((a * tile.up_row + r * tile.eighth_row) * groups), column,
            row_bytes, inside);
      } else if constexpr (kWeightBits == 4) {
        const int row_of_tile = a * tile.up_row + r * tile.eighth_row;
        load_exponents(weights.exponents[a][r], tile.gate_exponents + row_of_tile * (row_bytes / 16), column, row_bytes,
                       inside);
      }
    }
  }
}

template <int kWeightBits, int kPieces, bool kInt4, int kProducts>
MOEOPT_DEVICE void multiply_up(const FusedExpertsArgs& moe, const DirectTile<kWeightBits, kPieces, kInt4>& tile,
                               const uint16_t* tokens, const DirectUpStep<kWeightBits, kPieces, kInt4>& weights,
                               float (&sums)[kProducts][4]) {
  const int row_bytes = static_cast<int>(moe.hidden_size) * kWeightBits / 8;
  float partial[kProducts][4] = {};
  MOEOPT_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    const auto values = load_tokens<kWeightBits>((tile.step * kPieces + piece) * 64, row_bytes, tokens != nullptr,
                                                 [&](int k) { return ld_global_nc_v4(tokens + k); });
    if constexpr (kProducts == 1) {
      multiply_piece<kWeightBits>(weights.rows[0][0][piece], weights.rows[1][0][piece], values, sums[0]);
    } else if constexpr (kInt4) {
      MOEOPT_UNROLL
      for (int a = 0; a < 2; ++a) {
        multiply_piece(weights.rows[a][0][piece], weights.rows[a][1][piece], weights.factors[a][0],
                       weights.factors[a][1], piece, values, sums[a]);
      }
    } else if constexpr (kWeightBits == 4) {
      MOEOPT_UNROLL
      for (int a = 0; a < 2; ++a) {
        multiply_piece(weights.rows[a][0][piece], weights.rows[a][1][piece], weights.exponents[a][0][piece],
                       weights.exponents[a][1][piece], values, sums[a]);
      }
    } else {
      MOEOPT_UNROLL
      for (int a = 0; a < 2; ++a) {
        multiply_piece<kWeightBits>(weights.rows[a][0][piece], weights.rows[a][1][piece], values, partial[a]);
      }
    }
  }
  if constexpr (kWeightBits == 8) {
    MOEOPT_UNROLL
    for (int a = 0; a < 2; ++a) add_scaled_to(sums[a], weights.scale[a], partial[a]);
  }
}

// Row and column of the sum at index j = lane * 4 + register of a 16 x 8 product.
MOEOPT_DEVICE int fragment_row(int j) { return j / 16 + 8 * ((j & 3) >> 1); }
MOEOPT_DEVICE int fragment_column(int j) { return 2 * ((j >> 2) & 3) + (j & 1); }

MOEOPT_DEVICE void store_fragment(float* to, const float (&sums)[4]) {
  *reinterpret_cast<Vec4*>(to + thread_index() % 32 * 4) =
      Vec4{bits_from_float(sums[0]), bits_from_float(sums[1]), bits_from_float(sums[2]), bits_from_float(sums[3])};
}

// Stores h of one tile, one element per thread. Gate and up are in two products, or in two register pairs of one.
template <int kWeightBits, int kProducts, bool kInt4>
MOEOPT_DEVICE void finish_up(const DirectArgsOf<kInt4>& args, const DirectRouting& routing, int slot, int expert,
                             int first, const float* reduction) {
  const FusedExpertsArgs& moe = args.moe;
  const int thread = thread_index(), width = static_cast<int>(moe.intermediate_size);
  if (thread >= 64 * kProducts) return;
  const int j = kProducts == 2 ? thread : thread / 2 * 4 + thread % 2, to_up = kProducts == 2 ? 128 : 2;
  const int pair = slot_pair(routing, slot, fragment_column(j)), i = first + fragment_row(j);
  if (pair < 0) return;
  float value[2] = {0.0f, 0.0f};
  MOEOPT_UNROLL
  for (int a = 0; a < 2; ++a) {
    MOEOPT_UNROLL
    for (int w = 0; w < kDirectUpWarps; ++w) value[a] += reduction[w * kProducts * 128 + a * to_up + j];
    const int row = w13_row(moe.activation, width, i, a);
    if (moe.scale_kind == ScaleKind::kChannel) value[a] *= channel_scale(moe.w13_scale, expert, 2 * width, row);
    if constexpr (kWeightBits == 4 && !kInt4) value[a] *= kMxfp4Rescale;
    if (moe.w13_bias != nullptr) value[a] += channel_scale(moe.w13_bias, expert, 2 * width, row);
  }
  const uint32_t packed = cvt_bf16x2_f32(swiglu(moe.activation, value[0], value[1]), 0.0f);
  args.h[static_cast<int64_t>(pair) * width + i] = static_cast<uint16_t>(packed);
}

template <int kWeightBits, int kPieces, bool kInt4 = false>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kDirectUpWarps * 32, (kDirectUpBlocks<kWeightBits, kPieces>))
    direct_up_kernel(const MOEOPT_GRID_CONSTANT DirectArgsOf<kInt4> args) {
  constexpr int kProducts = DirectUpStep<kWeightBits, kPieces, kInt4>::kProducts;
  MOEOPT_SHARED_BASE(shared);
  DirectRouting& routing = *reinterpret_cast<DirectRouting*>(shared);
  float* reduction = reinterpret_cast<float*>(shared + kDirectScratchOffset);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // after the wait: the second kernel may read the ids at once
  build_direct_routing<kDirectUpWarps>(args.moe, routing, shared + kDirectScratchOffset);  // ends in bar_sync
  const FusedExpertsArgs& moe = args.moe;
  const int warp = thread_index() / 32, column = thread_index() % 32 / 4, top_k = static_cast<int>(moe.top_k);
  const int num_tasks = routing.num_slots * (static_cast<int>(moe.intermediate_size) / kDirectUpRows<kWeightBits>);
  int g = block_index();
  if (g >= num_tasks) return;
  DirectTile<kWeightBits, kPieces, kInt4> tile;
  DirectUpStep<kWeightBits, kPieces, kInt4> weights;
  tile.locate(args, routing, g);
  load_up(args, tile, weights);
  while (true) {
    const int slot = tile.slot, expert = tile.expert, first = tile.first;
    const int pair = slot_pair(routing, slot, column);
    const uint16_t* tokens = pair < 0 ? nullptr : static_cast<const uint16_t*>(moe.x) + pair / top_k * moe.x_stride;
    float sums[kProducts][4] = {};
    while (tile.step < tile.end) {
      multiply_up(moe, tile, tokens, weights, sums);
      ++tile.step;
      if (tile.step < tile.end) load_up(args, tile, weights);
    }
    g += grid_blocks();
    const bool more = g < num_tasks;
    if (more) {  // in flight while this tile is summed and stored
      tile.locate(args, routing, g);
      load_up(args, tile, weights);
    }
    MOEOPT_UNROLL
    for (int p = 0; p < kProducts; ++p) store_fragment(reduction + (warp * kProducts + p) * 128, sums[p]);
    bar_sync();
    finish_up<kWeightBits, kProducts, kInt4>(args, routing, slot, expert, first, reduction);
    if (!more) return;
    bar_sync();
  }
}

// --- down --------------------------------------------------------------------------------------------------------

// kOnce: one tile of rows per block. The loop over tiles costs registers, and therefore loads in flight.
template <int kWeightBits, bool kOnce, bool kInt4 = false>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kDirectDownWarps * 32, 1)
    direct_down_kernel(const MOEOPT_GRID_CONSTANT DirectArgsOf<kInt4> args) {
  constexpr int kBatch = kDirectDownBatch<kWeightBits>;
  constexpr int kTogether = kWeightBits == 4 ? 1 : kBatch;  // steps whose tokens are loaded at once: 4 bits need many
  MOEOPT_SHARED_BASE(shared);
  DirectRouting& routing = *reinterpret_cast<DirectRouting*>(shared);
  build_direct_routing<kDirectDownWarps>(args.moe, routing, shared + kDirectScratchOffset);  // ends in bar_sync
  const FusedExpertsArgs& moe = args.moe;
  const int warp = thread_index() / 32, group = thread_index() % 32 / 4, quad_lane = thread_index() % 4;
  const int hidden = static_cast<int>(moe.hidden_size), width = static_cast<int>(moe.intermediate_size);
  const int top_k = static_cast<int>(moe.top_k), num_sums = static_cast<int>(moe.num_tokens) * kDirectRows;
  float* all_sums = reinterpret_cast<float*>(shared + kDirectScratchOffset);  // [warp][token][row]
  float* sums = all_sums + warp * num_sums;
  const int row_bytes = width * kWeightBits / 8, steps = ceil_div(row_bytes, kDirectStepBytes);
  const int batches = ceil_div(steps, kBatch), total = routing.num_slots * batches;  // of a slot; of all
  const int begin = total * warp / kDirectDownWarps;                                 // this warp's first batch
  const int64_t scale_blocks = static_cast<int64_t>(ceil_div(hidden, 128)) * ceil_div(width, 128);
  const int64_t eight_rows = 8 * moe.w2_row_stride * kStrideBytes<kWeightBits>;
  const unsigned char* base = nullptr;
  int first_row = 0, scale_row = 0, left = 0, slot = 0, step = 0;  // left: batches
  Vec4 weights[kBatch][2][2];
  float scale[kBatch];               // FP8
  uint32_t exponents[kBatch][2][2];  // MXFP4
  DirectInt4<2> factors[kBatch][2];  // INT4
  int count = 0;
  const auto load = [&] {  // a batch: at most kBatch steps, of one slot
    count = steps - step < kBatch ? steps - step : kBatch;
    const int expert = routing.slot_expert[slot];
    const unsigned char* source = base + expert * moe.w2_expert_stride * kStrideBytes<kWeightBits>;
    MOEOPT_UNROLL
    for (int u = 0; u < kBatch; ++u) {
      const int column = (step + u) * kDirectStepBytes;
      MOEOPT_UNROLL
      for (int r = 0; r < 2; ++r) {
        load_step(weights[u][r], column, row_bytes, u < count,
                  [&](int byte) { return ld_global_nc_no_allocate_v4(source + r * eight_rows + byte); });
        if constexpr (kInt4) {
          const int row = (expert * hidden + first_row + group + 8 * r) * (width >> args.w2.shift);
          factors[u][r].load(args.w2, static_cast<uint32_t>(row), column, row_bytes, u < count);
        } else if constexpr (kWeightBits == 4) {
          const int groups = width / kScaleGroup;
          const uint8_t* row =
              moe.w2_exponents + (static_cast<int64_t>(expert) * hidden + first_row + group + 8 * r) * groups;
          load_exponents(exponents[u][r], row, column, row_bytes, u < count);
        }
      }
      scale[u] = 1.0f;
      if (kWeightBits == 8 && moe.scale_kind == ScaleKind::kBlock128 && u < count) {
        scale[u] = ld_global_nc(moe.w2_scale + expert * scale_blocks + scale_row + step + u);
      }
    }
  };
  const auto start = [&](int tile) {
    first_row = tile * kDirectRows;
    base =
        static_cast<const unsigned char*>(moe.w2) + (first_row + group) * moe.w2_row_stride * kStrideBytes<kWeightBits>;
    scale_row = first_row / 128 * ceil_div(width, 128);
    left = total * (warp + 1) / kDirectDownWarps - begin;
    slot = begin / batches;
    step = (begin - slot * batches) * kBatch;
    if (left > 0) load();
  };
  start(block_index());
  griddepcontrol_wait();
  for (int tile = block_index();;) {
    for (int i = thread_index() % 32; i < num_sums; i += 32) sums[i] = 0.0f;
    bar_warp_sync();
    float partial[4] = {0, 0, 0, 0};
    bool has_first_step = step == 0;
    while (left > 0) {
      const int pair = slot_pair(routing, slot, group);
      const uint16_t* h = args.h + static_cast<int64_t>(pair) * width;
      MOEOPT_UNROLL
      for (int first = 0; first < kBatch; first += kTogether) {
        PieceTokens<kWeightBits> values[kTogether][2];
        MOEOPT_UNROLL
        for (int u = first; u < first + kTogether; ++u) {
          MOEOPT_UNROLL
          for (int half = 0; half < 2; ++half) {
            values[u - first][half] =
                load_tokens<kWeightBits>((step + u) * kDirectStepBytes + half * 64, row_bytes, pair >= 0 && u < count,
                                         [&](int k) { return ld_global_cg_v4(h + k); });
          }
        }
        MOEOPT_UNROLL
        for (int u = first; u < first + kTogether; ++u) {
          float of_step[4] = {0, 0, 0, 0};
          MOEOPT_UNROLL
          for (int half = 0; half < 2; ++half) {
            if constexpr (kInt4) {
              multiply_piece(weights[u][0][half], weights[u][1][half], factors[u][0], factors[u][1], half,
                             values[u - first][half], partial);
            } else if constexpr (kWeightBits == 4) {
              multiply_piece(weights[u][0][half], weights[u][1][half], exponents[u][0][half], exponents[u][1][half],
                             values[u - first][half], partial);
            } else {
              multiply_piece<kWeightBits>(weights[u][0][half], weights[u][1][half], values[u - first][half],
                                          kWeightBits == 16 ? partial : of_step);
            }
          }
          if constexpr (kWeightBits == 8) add_scaled_to(partial, scale[u], of_step);
        }
      }
      --left;
      step += count;
      const int done = slot;
      const bool ends = left == 0 || step == steps, adds_bias = has_first_step;
      if (step == steps) {
        step = 0;
        ++slot;
        has_first_step = true;
      }
      if (left > 0) load();
      if (!ends) continue;
      const int expert = routing.slot_expert[done];
      MOEOPT_UNROLL
      for (int r = 0; r < 4; ++r) {
        const int row = group + 8 * (r / 2), to = slot_pair(routing, done, quad_lane * 2 + r % 2);
        if (to >= 0) {
          float value = partial[r];
          const int at = first_row + row;
          if (moe.scale_kind == ScaleKind::kChannel) value *= channel_scale(moe.w2_scale, expert, hidden, at);
          if constexpr (kWeightBits == 4 && !kInt4) value *= kMxfp4Rescale;
          if (moe.w2_bias != nullptr && adds_bias) value += channel_scale(moe.w2_bias, expert, hidden, at);
          sums[to / top_k * kDirectRows + row] += routing.weight[to] * value;
        }
        partial[r] = 0.0f;
      }
      bar_warp_sync();  // another lane may have the token in the next slot
    }
    const int rows = first_row;
    bool more = false;
    if constexpr (!kOnce) {
      tile += grid_blocks();
      more = tile < hidden / kDirectRows;
      if (more) start(tile);  // in flight while this tile is summed
    }
    bar_sync();
    for (int i = thread_index(); i < num_sums; i += block_threads()) {
      float sum = 0;
      MOEOPT_UNROLL
      for (int w = 0; w < kDirectDownWarps; ++w) sum += all_sums[w * num_sums + i];
      static_cast<uint16_t*>(moe.out)[i / kDirectRows * moe.out_stride + rows + i % kDirectRows] =
          static_cast<uint16_t>(cvt_bf16x2_f32(sum, 0.0f));
    }
    if (!more) return;
    bar_sync();
  }
}

}  // namespace moeopt
