// From accumulators to rows of h or y (grouped_gemm_sm90.cuh), through shared memory to 16-byte stores.
//
//   BF16            accumulators ──stmatrix, transposed──► staging: 64 tokens x 64 rows at a time ──► out
//   FP8 x FP8, up   largest of a token's 128 rows: over lanes, then warps of both warpgroups ──► scale
//                   accumulators / scale ──E4M3, rows g and g + 8 as one 16-bit unit, stmatrix──► staging ──► out
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/grouped_gemm_sm90_products.cuh"
#include "moeopt/grouped_gemm_sm90_shape.cuh"
#include "moeopt/mxfp4.cuh"
#include "moeopt/prepare_tokens.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

// Staging buffers of both math warpgroups. Chunks of 16 bytes are swizzled by the token number, so that neither the
// transposed stores nor the loads have bank conflicts.
struct Staging {
  unsigned char* both;
  int warpgroup, buffer_bytes, tokens;

  MOEOPT_DEVICE unsigned char* buffer(int of_warpgroup) const { return both + of_warpgroup * buffer_bytes; }
  // Rows of 64 BF16, one per token.
  MOEOPT_DEVICE uint16_t* chunk(int n, int c) const {
    return reinterpret_cast<uint16_t*>(buffer(warpgroup)) + n * 64 + ((c ^ n) & 7) * 8;
  }
  // Rows of 64 E4M3: twice as many tokens.
  MOEOPT_DEVICE unsigned char* quantized_chunk(int n, int c) const {
    return buffer(warpgroup) + n * 64 + ((c ^ (n >> 1)) & 3) * 16;
  }
  // Largest magnitudes of token n among the 16 rows of each warp; shares memory with the rows.
  MOEOPT_DEVICE float* largest(int of_warpgroup, int n) const {
    return reinterpret_cast<float*>(buffer(of_warpgroup)) + n * 4;
  }
  // 1 / scale of every token, after the rows, in the order of token_scale_place.
  MOEOPT_DEVICE float* inverse_scales() const { return reinterpret_cast<float*>(buffer(warpgroup) + tokens * 128); }
};

// 8 rows of token n, in the order the down GEMM of FP8 weights reads them (prepare_tokens.cuh).
MOEOPT_DEVICE Vec4 load_permuted(const Staging& staging, int n, int chunk) {
  const Vec4 low = *reinterpret_cast<const Vec4*>(staging.chunk(n, chunk & ~1));
  const Vec4 high = *reinterpret_cast<const Vec4*>(staging.chunk(n, chunk | 1));
  return chunk % 2 ? Vec4{low.y, low.w, high.y, high.w} : Vec4{low.x, low.z, high.x, high.z};
}

// 8 rows of token n, in the order of mxfp4_position. The four warps' 16 rows lie one after the other.
MOEOPT_DEVICE Vec4 load_for_mxfp4(const Staging& staging, int n, int chunk) {
  uint32_t words[4];
  MOEOPT_UNROLL
  for (int t = 0; t < 4; ++t) {
    const uint16_t* from = staging.chunk(n, 2 * t + chunk / 4) + chunk % 4;
    words[t] = from[0] | static_cast<uint32_t>(from[4]) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

enum class RowOrder { kPlain, kFp8Weights, kMxfp4Weights };  // of the rows that store_tile writes

// Writes BF16 rows of the tile's tokens. All loads of a part are issued before the first store: one round at a time
// would wait for shared memory once per 16 tokens, a quarter of the down launch's time.
template <int kColumns, int kStagedTokens, RowOrder kOrder>
MOEOPT_DEVICE void store_tile(const GemmArgs& args, const TokenTile& tile, int first, const Staging& staging,
                              const float (&values)[kColumns / 2]) {
  constexpr int kRounds = kStagedTokens / 16;
  const int thread = thread_index() % 128, lane = thread % 32, warp = thread / 32;
  const int token = thread / 8, chunk = thread % 8;
  // Of this thread: every 16th token, 8 rows.
  // kMxfp4Weights: rows past the end are zeros and fill up the last 128.
  const int count = kOrder == RowOrder::kMxfp4Weights || first + chunk * 8 < args.rows ? tile.count - token : 0;
  uint16_t* out = args.out + (tile.begin + token) * args.out_stride + first + chunk * 8;
  MOEOPT_UNROLL
  for (int part = 0; part < kColumns; part += kStagedTokens) {
    bar_sync(1 + staging.warpgroup, 128);  // all threads have read the buffer's last contents
    MOEOPT_UNROLL
    for (int n = 0; n < kStagedTokens; n += 16) {
      if (part + n >= kColumns) continue;
      const float* v = values + (part + n) / 2;
      stmatrix_x4_trans(staging.chunk(n + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2),
                        cvt_bf16x2_f32(v[0], v[1]), cvt_bf16x2_f32(v[2], v[3]), cvt_bf16x2_f32(v[4], v[5]),
                        cvt_bf16x2_f32(v[6], v[7]));
    }
    bar_sync(1 + staging.warpgroup, 128);
    Vec4 rows[kRounds];
    MOEOPT_UNROLL
    for (int j = 0; j < kRounds; ++j) {
      if (part + 16 * j >= kColumns) continue;
      const int n = token + 16 * j;
      rows[j] = kOrder == RowOrder::kFp8Weights     ? load_permuted(staging, n, chunk)
                : kOrder == RowOrder::kMxfp4Weights ? load_for_mxfp4(staging, n, chunk)
                                                    : *reinterpret_cast<const Vec4*>(staging.chunk(n, chunk));
    }
    MOEOPT_UNROLL
    for (int j = 0; j < kRounds; ++j) {
      const int n = part + 16 * j;
      if (n < kColumns && n < count) *reinterpret_cast<Vec4*>(out + n * args.out_stride) = rows[j];
    }
  }
}

// One round of find_largest: of two lanes that differ in `mask`, each keeps one half of their kCount columns.
template <int kCount, int kTops>
MOEOPT_DEVICE void keep_half(float (&top)[kTops], int mask, int& first) {
  const bool upper = thread_index() & mask;
  MOEOPT_UNROLL
  for (int i = 0; i < kCount / 2; ++i) {
    const float low = top[i], high = top[i + kCount / 2];
    top[i] = max_abs_f32(upper ? high : low, shfl_bfly(upper ? low : high, mask));
  }
  first += upper ? kCount / 2 : 0;
}

// Stores the largest magnitude of each column among the warp's 16 rows. The 8 lanes with the same t have the same
// columns; at the end each of them has an eighth.
template <int kColumns>
MOEOPT_DEVICE void find_largest(const float (&values)[kColumns / 2], const Staging& staging) {
  constexpr int kMine = kColumns / 4, kPadded = (kMine + 7) / 8 * 8;
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  float top[kPadded] = {};
  MOEOPT_UNROLL
  for (int i = 0; i < kMine; ++i) {
    const int r = i / 2 * 4 + i % 2;  // row g; row g + 8 is two registers on
    top[i] = max_abs_f32(values[r], values[r + 2]);
  }
  int first = 0;
  keep_half<kPadded>(top, 16, first);
  keep_half<kPadded / 2>(top, 8, first);
  keep_half<kPadded / 4>(top, 4, first);
  MOEOPT_UNROLL
  for (int i = 0; i < kPadded / 8; ++i) {
    const int at = first + i;
    if (at < kMine) staging.largest(staging.warpgroup, at / 2 * 8 + lane % 4 * 2 + at % 2)[warp] = top[i];
  }
}

// Selectors of prmt: bytes 0 and 2 of either word; bytes 1 and 3.
constexpr uint32_t kEvenBytes = 0x6420, kOddBytes = 0x7531;

MOEOPT_DEVICE float largest_of(const float* four) {
  const Vec4 v = *reinterpret_cast<const Vec4*>(four);
  return max_abs_f32(max_abs_f32(float_from_bits(v.x), float_from_bits(v.y)),
                     max_abs_f32(float_from_bits(v.z), float_from_bits(v.w)));
}

// 16 of the 64 staged rows of a token in the order of e4m3_position: rows 4 chunk .. 4 chunk + 3 of each of the four
// warps.
MOEOPT_DEVICE Vec4 load_quantized_for_mxfp4(const Staging& staging, int n, int chunk) {
  uint32_t words[4];
  MOEOPT_UNROLL
  for (int warp = 0; warp < 4; ++warp) {
    const auto* units = reinterpret_cast<const uint32_t*>(staging.quantized_chunk(n, warp)) + chunk % 2 * 2;
    words[warp] = prmt(units[0], units[1], chunk < 2 ? kEvenBytes : kOddBytes);
  }
  return {words[0], words[1], words[2], words[3]};
}

// Bytes from a row that store_quantized writes to the next. Asked for at each use: held, it changes FP8's machine code.
template <bool kMxfp4>
MOEOPT_DEVICE int64_t quantized_stride(const GemmArgs& args) {
  return kMxfp4 ? args.out_stride : args.rows;
}

// Writes E4M3 rows of the tile's tokens, and a scale for the 128 rows of both warpgroups.
// kMxfp4: in the order of e4m3_position; rows past the end are zeros and fill up the last 128.
template <int kColumns, int kStagedTokens, bool kMxfp4>
MOEOPT_DEVICE void store_quantized(const GemmArgs& args, const TokenTile& tile, int first,
                                   const float (&values)[kColumns / 2], const Staging& staging) {
  constexpr int kAtOnce = 2 * kStagedTokens;
  const int thread = thread_index() % 128, lane = thread % 32, warp = thread / 32;
  const int token = thread / 4, chunk = thread % 4;
  // Of this thread: every 32nd token, 16 rows.
  const int count = kMxfp4 || first + chunk * 16 < args.rows ? tile.count - token : 0;
  uint8_t* out = args.out_quantized + static_cast<int64_t>(tile.begin + token) * quantized_stride<kMxfp4>(args) +
                 first + chunk * 16;
  bar_sync(1 + staging.warpgroup, 128);  // all threads have read the buffer's last contents
  find_largest<kColumns>(values, staging);
  bar_sync(3, 256);
  for (int n = thread; n < kColumns; n += 128) {
    const float top = max_abs_f32(largest_of(staging.largest(0, n)), largest_of(staging.largest(1, n)));
    const float scale = quantization_scale(top);
    staging.inverse_scales()[token_scale_place(n)] = rcp_approx(scale);
    if (staging.warpgroup == 0 && n < tile.count) {
      args.out_scale[static_cast<int64_t>(tile.begin + n) * ceil_div(args.rows, 128) + first / 128] = scale;
    }
  }
  bar_sync(3, 256);  // the rows overwrite `largest`
  float inverse[4];
  MOEOPT_UNROLL
  for (int part = 0; part < kColumns; part += kAtOnce) {
    if (part > 0) bar_sync(1 + staging.warpgroup, 128);
    MOEOPT_UNROLL
    for (int n = part; n < part + kAtOnce && n < kColumns; n += 32) {
      uint32_t units[4] = {};
      MOEOPT_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (n + 8 * j >= kColumns) continue;
        const int r = (n + 8 * j) / 2;
        if (j % 2 == 0) load_token_scales(inverse, staging.inverse_scales(), n / 16 + j / 2);
        const float inverse0 = inverse[j % 2 * 2], inverse1 = inverse[j % 2 * 2 + 1];
        units[j] = cvt_e4m3x2_f32(values[r] * inverse0, values[r + 2] * inverse0) |
                   cvt_e4m3x2_f32(values[r + 1] * inverse1, values[r + 3] * inverse1) << 16;
      }
      stmatrix_x4_trans(staging.quantized_chunk(n - part + lane, warp), units[0], units[1], units[2], units[3]);
    }
    bar_sync(1 + staging.warpgroup, 128);
    Vec4 rows[kAtOnce / 32];
    MOEOPT_UNROLL
    for (int j = 0; j < kAtOnce / 32; ++j) {
      if (part + 32 * j >= kColumns) continue;
      const int n = token + 32 * j;
      rows[j] = kMxfp4 ? load_quantized_for_mxfp4(staging, n, chunk)
                       : *reinterpret_cast<const Vec4*>(staging.quantized_chunk(n, chunk));
    }
    MOEOPT_UNROLL
    for (int j = 0; j < kAtOnce / 32; ++j) {
      const int n = part + 32 * j;
      const Vec4 v = rows[j];
      if (n < kColumns && n < count) {
        *reinterpret_cast<Vec4*>(out + static_cast<int64_t>(n) * quantized_stride<kMxfp4>(args)) =
            kMxfp4 ? v
                   : Vec4{prmt(v.x, v.y, kEvenBytes), prmt(v.z, v.w, kEvenBytes), prmt(v.x, v.y, kOddBytes),
                          prmt(v.z, v.w, kOddBytes)};
      }
    }
  }
}

// Scale (per channel; MXFP4 in BF16: of all; kMxfp4 sets its own) and bias of a thread's two rows of operand `which`,
// which begins at row `first`.
struct RowTerms {
  float scale[2], bias[2] = {0.0f, 0.0f};
};
template <GemmMode kMode, bool kUp>
MOEOPT_DEVICE RowTerms row_terms(const GemmArgs& args, int expert, int first, int which) {
  constexpr int kWarpsApart = kWarpRows<kMode, kUp>;
  RowTerms terms;
  terms.scale[0] = terms.scale[1] = kMode == GemmMode::kMxfp4Weights ? kMxfp4Rescale : 1.0f;
  MOEOPT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int inside = first + thread_index() % 128 / 32 * kWarpsApart + thread_index() % 32 / 4 + 8 * half;
    if (inside >= args.rows) continue;
    const int row = kUp ? w13_row(args.activation, args.rows, inside, which) : inside;
    if (args.scale_kind == ScaleKind::kChannel) {
      terms.scale[half] = channel_scale(args.weight_scale, expert, args.weight_rows, row);
    }
    if (args.bias != nullptr) terms.bias[half] = channel_scale(args.bias, expert, args.weight_rows, row);
  }
  return terms;
}

// kMxfp4: with the scales of the rows.
template <bool kUp>
MOEOPT_DEVICE RowTerms row_terms(const GemmArgs& args, int expert, int first, int which,
                                 const LargestExponents& largest) {
  RowTerms terms = row_terms<GemmMode::kMxfp4, kUp>(args, expert, first, which);
  terms.scale[0] = mxfp4_row_scale(largest.of(which, 0));
  terms.scale[1] = mxfp4_row_scale(largest.of(which, 1));
  return terms;
}

template <int kSums>
MOEOPT_DEVICE void add_row_terms(float (&sum)[kSums], const RowTerms& terms) {
  MOEOPT_UNROLL
  for (int r = 0; r < kSums; ++r) sum[r] = sum[r] * terms.scale[r % 4 / 2] + terms.bias[r % 4 / 2];
}

}  // namespace moeopt
