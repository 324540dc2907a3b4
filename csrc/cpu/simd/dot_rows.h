// Dot products of many tokens, more than one register tile takes, with 16 rows of weights.
//
// Four rows at a time: they stay in the L1 cache while the tokens pass over them, one register tile of tokens after the
// other. From ten tokens on, eight rows where a Format has registers for it: tokens are then read half as often. FP8
// rows are first decoded into a buffer in L1. Meanwhile every step prefetches its share of the next rows, so memory is
// never idle. K is cut into blocks, so that a tile's activations stay in L1; partial sums wait in `state` between
// blocks.
//
// This header and dot_streams.h add the products of a (token, row) in the same order, so a token's result does not
// depend on the rest of the batch. Internal linkage: see number_formats.h.
#pragma once

#include "register_tile.h"

namespace moeopt {
namespace {

// Fewest tokens for eight rows. With fewer, at most three tiles would have to prefetch the next eight rows, which takes
// more than two lines per step.
constexpr int64_t kWideFromTokens = 10;
// Columns per block of K. Measured on a core with 48 KiB of L1 and 1 MiB of L2: shorter blocks lose more by saving
// partial sums than they gain from L1.
constexpr int64_t kBlockColumns = 2048;
// Tokens that pass over the rows together. Rows are decoded once for all of them.
constexpr int64_t kChunkTokens = 128;
// Prefetch distance. Measured: FP8 rows of 2 KiB gain from more than four rows, BF16 rows of 4 KiB lose with more.
constexpr int64_t kAheadBytes = 8192;

template <typename Format, int R, Ahead kAhead>
inline void multiply_tile(int64_t tokens, const char* const* x, const Block<Format>& block, typename Format::Vec* state,
                          float* out) {
  if (block.scale[0]) {
    tile_of<Format, R, Scaling::kShared, kAhead>(tokens, x, block, state, out);
  } else {
    tile_of<Format, R, Scaling::kNone, kAhead>(tokens, x, block, state, out);
  }
}

// What a thread needs for its dot products.
template <typename Format>
struct DotScratch {
  typename Format::Decoded::Vec* state;       // [kChunkTokens * kWideRows]
  typename Format::Decoded::Weight* decoded;  // kTileRows rows; unused where Format does not decode
  int64_t decoded_stride;
};

// Memory to prefetch: `bytes` from `cursor` on; null: none.
struct Fetch {
  const char* cursor;
  int64_t bytes;
};

// out[t * kRows + n] = x[t] . row n, n < R. kAhead: how `fetch` is fetched.
template <typename Format, int R, Ahead kAhead>
void dot_many(const char* const* x, int64_t tokens, const WeightRows<Format>& rows, Fetch fetch,
              typename Format::Vec* state, float* out) {
  constexpr int kTokens = R == kTileRows ? Format::kTileTokens : Format::kWideTokens;
  const int64_t tiles = (tokens + kTokens - 1) / kTokens, least = tokens / tiles, longer = tokens % tiles;
  const int64_t step_bytes = fetch.bytes / (tiles * (rows.columns / Format::kStep) + 1) + 1;
  // At most two lines per step are prefetched; a longer step would leave gaps.
  const char* ahead = step_bytes <= 2 * kLineBytes ? fetch.cursor : nullptr;
  for (int64_t begin = 0; begin < rows.columns; begin += kBlockColumns) {
    Block<Format> block{};
    block.w = rows.w;
    block.row_stride = rows.row_stride;
    block.begin = begin;
    block.end = begin + kBlockColumns < rows.columns ? begin + kBlockColumns : rows.columns;
    block.first = begin == 0;
    block.last = block.end == rows.columns;
    block.scale[0] = rows.scale;
    for (int n = 0; n < kTileRows; ++n) block.groups[n] = rows.groups.from(n * rows.step);
    block.ahead_bytes = step_bytes;
    for (int64_t t = 0, m = 0; t < tiles; ++t) {
      const int64_t count = least + (t < longer ? 1 : 0);
      block.ahead = ahead;
      if (ahead) {
        multiply_tile<Format, R, kAhead>(count, x + m, block, state + m * R, out + m * kRows);
        ahead += block.steps() * step_bytes;
      } else {
        multiply_tile<Format, R, Ahead::kNothing>(count, x + m, block, state + m * R, out + m * kRows);
      }
      m += count;
    }
  }
}

// out[t * kRows + n] = x[t] . row n, for up to kChunkTokens tokens. `next`: the 16 rows wanted after these, or null.
template <typename Format>
void dot_rows(const char* const* x, int64_t tokens, const WeightRows<Format>& rows, const typename Format::Weight* next,
              const DotScratch<Format>& scratch, float* out) {
  using Decoded = typename Format::Decoded;
  static_assert(Format::kMaxTokens >= Decoded::kTileTokens, "decoded rows are for several tiles");
  const int64_t row_bytes = rows.row_stride * static_cast<int64_t>(sizeof(typename Format::Weight));
  const bool wide = Format::kWideTokens > 0 && tokens >= kWideFromTokens;
  const int64_t step = wide ? kWideRows : kTileRows;
  int64_t rows_ahead = kAheadBytes / rows.stored_bytes() / kTileRows * kTileRows;
  if (rows_ahead < step) rows_ahead = step;
  if (rows_ahead > kRows) rows_ahead = kRows;
  for (int64_t r = 0; r < kRows; r += step) {
    const int64_t later = r + rows_ahead;
    const typename Format::Weight* ahead = rows.row(later);
    if (later >= kRows) ahead = next ? next + (later - kRows) * rows.row_stride : nullptr;
    const WeightRows<Format> these = rows.from(r);
    Fetch fetch{reinterpret_cast<const char*>(ahead), step * row_bytes};
    if constexpr (Format::kDecodes) {
      const int64_t half = row_bytes / 2 / kLineBytes * kLineBytes;
      for (int n = 0; n < kTileRows; ++n) {
        Format::decode_row(these.row(n), rows.columns, scratch.decoded + n * scratch.decoded_stride, fetch.cursor);
        if (fetch.cursor) fetch = {fetch.cursor + half, fetch.bytes - half};
      }
      const WeightRows<Decoded> decoded{scratch.decoded, scratch.decoded_stride, rows.columns, rows.scale, {}, 0};
      dot_many<Decoded, kTileRows, Ahead::kStreamToL2>(x, tokens, decoded, fetch, scratch.state, out + r);
    } else {
      if constexpr (Format::kWideTokens > 0) {
        if (wide) {
          dot_many<Format, kWideRows, Ahead::kStream>(x, tokens, these, fetch, scratch.state, out + r);
          continue;
        }
      }
      dot_many<Format, kTileRows, Ahead::kStream>(x, tokens, these, fetch, scratch.state, out + r);
    }
  }
}

}  // namespace
}  // namespace moeopt
