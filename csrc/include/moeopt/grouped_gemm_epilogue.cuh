// From accumulators to rows of h or y (grouped_gemm.cuh): scale, bias, BF16, through shared memory to 16-byte stores.
//
//   accumulators ──stmatrix, transposed──► staging: 64 tokens x 64 rows at a time ──► out
//   FP8 x FP8, up:  largest of the 64 rows ──► of the 128 of both warpgroups ──► E4M3 and a scale per 128 rows
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/grouped_gemm_shape.cuh"
#include "moeopt/prepare_tokens.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

// The staging buffers of both math warpgroups. Rows of 64 BF16, one per token, their 16-byte chunks exchanged by the
// row's number so that neither the transposed stores nor the loads meet a bank twice.
struct Staging {
  unsigned char* both;
  int warpgroup, buffer_bytes, tokens;

  MOEOPT_DEVICE uint16_t* chunk(int n, int c) const {
    return reinterpret_cast<uint16_t*>(both + warpgroup * buffer_bytes) + n * 64 + ((c ^ n) & 7) * 8;
  }
  // Largest magnitude of token n among the rows of a warpgroup, as the bits of a float.
  MOEOPT_DEVICE uint32_t& largest(int of_warpgroup, int n) const {
    return reinterpret_cast<uint32_t*>(both + of_warpgroup * buffer_bytes + tokens * 128)[n];
  }
};

// 8 rows of token n, in the order the down GEMM of FP8 weights reads them (prepare_tokens.cuh).
MOEOPT_DEVICE Vec4 load_permuted(const Staging& staging, int n, int chunk) {
  const Vec4 low = *reinterpret_cast<const Vec4*>(staging.chunk(n, chunk & ~1));
  const Vec4 high = *reinterpret_cast<const Vec4*>(staging.chunk(n, chunk | 1));
  return chunk % 2 ? Vec4{low.y, low.w, high.y, high.w} : Vec4{low.x, low.z, high.x, high.z};
}

// Sets the rows of a warpgroup's staged tokens, E4M3, and their scales. A token's 64 rows lie with 8 neighbouring lanes.
MOEOPT_DEVICE void write_quantized(const GemmArgs& args, const TokenTile& tile, int first, int part, int staged,
                                   const Staging& staging) {
  const int chunk = thread_index() % 8, groups = ceil_div(args.rows, 128);
  for (int n = thread_index() % 128 / 8; n < staged; n += 16) {
    const Vec4 v = *reinterpret_cast<const Vec4*>(staging.chunk(n, chunk));
    const uint32_t top = warp_eighth_max(larger_of_pair(larger_magnitudes(v, 0)));
    if (chunk == 0) staging.largest(staging.warpgroup, n) = top;
  }
  sync_named(3, 256);  // both warpgroups: together they have the 128 rows of a scale
  for (int n = thread_index() % 128 / 8; n < staged && part + n < tile.count; n += 16) {
    if (first + chunk * 8 >= args.rows) break;
    const uint32_t top0 = staging.largest(0, n), top1 = staging.largest(1, n);
    const float scale = quantization_scale(float_from_bits(top0 > top1 ? top0 : top1));
    const int64_t row = tile.begin + part + n;
    const Quantized8 q = quantize8(*reinterpret_cast<const Vec4*>(staging.chunk(n, chunk)), scale);
    auto* to = reinterpret_cast<uint32_t*>(args.out_quantized + row * args.rows + first + chunk * 8);
    to[0] = q.low;
    to[1] = q.high;
    if (chunk == 0 && first % 128 == 0) args.out_scale[row * groups + first / 128] = scale;
  }
}

// Writes the rows of the tile's tokens. `value(r)` is the result in accumulator register r.
template <int kColumns, int kStagedTokens, bool kQuantize, typename Value>
MOEOPT_DEVICE void store_tile(const GemmArgs& args, const TokenTile& tile, int first, bool permute,
                              const Staging& staging, const Value& value) {
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  MOEOPT_UNROLL
  for (int part = 0; part < kColumns; part += kStagedTokens) {
    // The buffer's last readers are done; `largest` is read by both warpgroups.
    if constexpr (kQuantize) {
      sync_named(3, 256);
    } else {
      sync_named(1 + staging.warpgroup, 128);
    }
    MOEOPT_UNROLL
    for (int n = 0; n < kStagedTokens; n += 16) {
      if (part + n >= kColumns) continue;
      const int r = (part + n) / 2;
      store_transposed(staging.chunk(n + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2),
                       pack_bf16x2(value(r), value(r + 1)), pack_bf16x2(value(r + 2), value(r + 3)),
                       pack_bf16x2(value(r + 4), value(r + 5)), pack_bf16x2(value(r + 6), value(r + 7)));
    }
    sync_named(1 + staging.warpgroup, 128);
    const int staged = kColumns - part < kStagedTokens ? kColumns - part : kStagedTokens;
    if constexpr (kQuantize) {
      write_quantized(args, tile, first, part, staged, staging);
    } else {
      const int chunk = thread_index() % 8;
      for (int n = thread_index() % 128 / 8; n < staged && part + n < tile.count; n += 16) {
        if (first + chunk * 8 >= args.rows) break;
        const Vec4 v = permute ? load_permuted(staging, n, chunk)
                               : *reinterpret_cast<const Vec4*>(staging.chunk(n, chunk));
        *reinterpret_cast<Vec4*>(args.out + (tile.begin + part + n) * args.out_stride + first + chunk * 8) = v;
      }
    }
  }
}

// Scale (per channel) and bias of a thread's two rows.
struct RowTerms {
  float scale[2], bias[2];
};
MOEOPT_DEVICE RowTerms row_terms(const GemmArgs& args, int expert, const int (&rows)[2]) {
  RowTerms terms = {{1.0f, 1.0f}, {0.0f, 0.0f}};
  MOEOPT_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (rows[half] < 0) continue;
    if (args.scale_kind == ScaleKind::kChannel) {
      terms.scale[half] = channel_scale(args.weight_scale, expert, args.weight_rows, rows[half]);
    }
    if (args.bias != nullptr) terms.bias[half] = channel_scale(args.bias, expert, args.weight_rows, rows[half]);
  }
  return terms;
}

}  // namespace moeopt
