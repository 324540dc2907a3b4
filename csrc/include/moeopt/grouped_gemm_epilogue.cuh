// From accumulators to rows of h or y (grouped_gemm.cuh): scale, bias, BF16, through shared memory to 16-byte stores.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/grouped_gemm_shape.cuh"
#include "moeopt/prepare_tokens.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

// Position of element (n, m) in a warpgroup's staging buffer, in BF16: rows of 64, chunks of 8 exchanged so that the 4
// columns one store instruction touches lie in different banks.
MOEOPT_DEVICE int staging_index(int n, int m) { return n * 64 + ((((m >> 3) ^ (n >> 1)) & 7) << 3) + (m & 7); }

// Stages kColumns x 64 values, then writes the rows of the tile's tokens, 16 bytes per thread. `value(r)` is the result
// in accumulator register r.
template <int kColumns, bool kUp, typename Value>
MOEOPT_DEVICE void store_tile(const GemmArgs& args, const TokenTile& tile, int first, uint16_t* staging, int warpgroup,
                              const Value& value) {
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  sync_named(1 + warpgroup, 128);  // the buffer's last readers are done
  MOEOPT_UNROLL
  for (int r = 0; r < kColumns / 2; ++r) {
    const int n = r / 4 * 8 + lane % 4 * 2 + r % 2;
    int m = warp * 16 + lane / 4 + 8 * (r % 4 / 2);
    if (kUp && args.permute_out) m = permuted_position(m);
    staging[staging_index(n, m)] = static_cast<uint16_t>(pack_bf16x2(value(r), 0.0f));
  }
  sync_named(1 + warpgroup, 128);
  const int chunk = thread_index() % 8;
  for (int n = thread_index() % 128 / 8; n < tile.count; n += 16) {
    if (first + chunk * 8 >= args.rows) break;
    const Vec4 v = *reinterpret_cast<const Vec4*>(staging + staging_index(n, chunk * 8));
    *reinterpret_cast<Vec4*>(args.out + (tile.begin + n) * args.out_stride + first + chunk * 8) = v;
  }
}

// The same for kColumns x 32 values of a wide tile; `value(r)` for the gates' registers, r % 4 < 2.
template <int kColumns, typename Value>
MOEOPT_DEVICE void store_up_tile(const GemmArgs& args, const TokenTile& tile, int first, uint16_t* staging,
                                 int warpgroup, const Value& value) {
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  const auto index = [](int n, int chunk) { return n * 32 + (((chunk ^ (n >> 1)) & 3) << 3); };
  sync_named(1 + warpgroup, 128);  // the buffer's last readers are done
  MOEOPT_UNROLL
  for (int r = 0; r < kColumns / 2; ++r) {
    if (r % 4 >= 2) continue;
    const int n = r / 4 * 8 + lane % 4 * 2 + r % 2;
    staging[index(n, warp) + lane / 4] = static_cast<uint16_t>(pack_bf16x2(value(r), 0.0f));
  }
  sync_named(1 + warpgroup, 128);
  const int chunk = thread_index() % 4;
  for (int n = thread_index() % 128 / 4; n < tile.count; n += 32) {
    if (first + chunk * 8 >= args.rows) break;
    const Vec4 v = *reinterpret_cast<const Vec4*>(staging + index(n, chunk));
    *reinterpret_cast<Vec4*>(args.out + (tile.begin + n) * args.out_stride + first + chunk * 8) = v;
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
