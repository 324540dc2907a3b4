// Dot products of many tokens with 16 rows of weights, for any instruction set and any pair of dtypes.
//
// A dot product keeps its partial sums in the lanes of one register, lanes along K. So the rows are read as
// they lie in memory, and nothing is ever repacked:
//
//               k ->
//   x rows    |====|====|====|   M tokens --+
//                                           +--> acc[m][n] += x[m][k..] * w[n][k..]   (one register each)
//   w rows    |====|====|====|   R rows   --+        | lanes summed in a fixed order
//                                                    v
//                                                out[m][n]   (FP32)
//
// Four rows (R) at a time: they stay in the L1 cache while the tokens pass over them, a register tile (M) of tokens at
// a time. From ten tokens on eight rows, where a Format has registers for it: tokens are then read half as often. FP8
// rows that more than one tile passes over are decoded first, into a buffer that stays in L1 as well.
// Meanwhile the rows some way ahead are fetched: memory works all the time the multipliers do.
//   one tile of tokens    every step fetches as many bytes as it reads
//   more                  every step fetches its share of what the tiles together read once
// K is cut into blocks, so that a tile's activations stay in L1; the partial sums wait in `state` between blocks.
// Every way adds the products of a (token, row) in the same order, so a token's result does not depend on the rest
// of the batch.
//
// A Format names the dtypes and holds the instructions; see formats_*.h. Internal linkage: see
// number_formats.h.
#pragma once

#include <cstdint>

#include "../expert_kernels.h"

namespace moeopt {
namespace {

constexpr int kRows = kSizeMultiple;
constexpr int kTileRows = 4;
constexpr int kWideRows = 8;
// Tokens that eight rows are for. Fewer make three tiles or less, and fetching the next eight rows meanwhile would take
// more than two lines per step.
constexpr int64_t kWideFromTokens = 10;
// Columns per block of K. Chosen by measurement on a core with 48 KiB of L1 and 1 MiB of L2: shorter blocks spend
// more on saving partial sums than the L1 gives back.
constexpr int64_t kBlockColumns = 2048;
// Tokens that pass over the rows together. Rows are decoded once for all of them.
constexpr int64_t kChunkTokens = 128;
constexpr int64_t kLineBytes = 64;
// How far ahead rows are fetched. Chosen by measurement: FP8 rows of 2 KiB gain from more than four rows, BF16 rows
// of 4 KiB lose with more.
constexpr int64_t kAheadBytes = 8192;

// Hints of __builtin_prefetch. Rows that one tile of tokens reads are not wanted in L2 afterwards.
constexpr int kIntoL1Only = 0, kIntoL2 = 2, kIntoL1AndL2 = 3;

// What to fetch while multiplying.
enum class Ahead {
  kNothing,
  kRows,        // a line of each row per step, of as many other rows
  kStream,      // one or two lines per step from a cursor, into L1
  kStreamToL2,  // the same, into L2: L1 is taken by decoded rows
};

// One block of K of a register tile, and what is needed around it.
template <typename Format>
struct Block {
  const typename Format::Weight* w;  // first row, at k = 0
  int64_t row_stride;
  int64_t begin, end;   // of K
  bool first, last;     // of the blocks of K
  const float* scale;   // one factor per 128 of k, or null
  const char* ahead;    // what the step at `begin` fetches
  int64_t ahead_bytes;  // from step to step
  int64_t line_bytes;   // kRows: from one of a step's lines to the next

  int64_t steps() const { return (end - begin) / Format::kStep; }
};

// Loads `value` once. Left alone, the compiler reads an activation again for each row, as the memory operand
// of the multiplication, and the loads become the limit.
template <typename Operand>
inline __attribute__((always_inline)) void keep_in_register(Operand& value) {
  asm("" : "+v"(value));
}

// acc[m][n] += x[m] . w[n] over [k_begin, k_end).
template <typename Format, int M, int R, Ahead kAhead>
inline __attribute__((always_inline)) void multiply(const char* const* x, const Block<Format>& block, int64_t k_begin,
                                                    int64_t k_end, typename Format::Vec (&acc)[M][R]) {
  const typename Format::Weight* w = block.w;
  const int64_t row_stride = block.row_stride;
  const char* ahead = block.ahead;
  const int64_t ahead_bytes = block.ahead_bytes, line_bytes = block.line_bytes;
  if constexpr (kAhead != Ahead::kNothing) ahead += (k_begin - block.begin) / Format::kStep * ahead_bytes;
  int64_t k = k_begin;
  for (; k + Format::kStep <= k_end; k += Format::kStep) {
    if constexpr (kAhead == Ahead::kRows) {
#pragma GCC unroll 8
      for (int n = 0; n < R; ++n) {
        __builtin_prefetch(ahead + n * line_bytes, 0, Format::kFetchesRowByRow ? kIntoL1Only : kIntoL1AndL2);
      }
      ahead += ahead_bytes;
    }
    if constexpr (kAhead == Ahead::kStream || kAhead == Ahead::kStreamToL2) {
      constexpr int kHint = kAhead == Ahead::kStream ? kIntoL1AndL2 : kIntoL2;
      __builtin_prefetch(ahead, 0, kHint);
      if (ahead_bytes > kLineBytes) __builtin_prefetch(ahead + ahead_bytes / 2, 0, kHint);
      ahead += ahead_bytes;
    }
#pragma GCC unroll 2
    for (int part = 0; part < Format::kParts; ++part) {
      typename Format::Operand a[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        a[m] = Format::activation(x[m], k, part);
        keep_in_register(a[m]);
      }
#pragma GCC unroll 8
      for (int n = 0; n < R; ++n) {
        typename Format::Operand b = Format::weight(w + n * row_stride + k, part);
        keep_in_register(b);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) acc[m][n] = Format::multiply_add(a[m], b, acc[m][n]);
      }
    }
  }
  if constexpr (Format::kStep > kSizeMultiple) {
    if (k == k_end) return;
#pragma GCC unroll 2
    for (int part = 0; part < Format::kParts; ++part) {
#pragma GCC unroll 8
      for (int n = 0; n < R; ++n) {
        const typename Format::Operand b = Format::weight_tail(w + n * row_stride + k, part, k_end - k);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          acc[m][n] = Format::multiply_add(Format::activation_tail(x[m], k, part, k_end - k), b, acc[m][n]);
        }
      }
    }
  }
}

// M tokens x R rows: out[m * kRows + n], or the partial sums in `state` before the last block. kScaled: block.scale is
// not null. With both cases in one function the compiler keeps sums in memory: measured 0.75 of the speed.
template <typename Format, int M, int R, bool kScaled, Ahead kAhead>
void tile(const char* const* x, const Block<Format>& block, typename Format::Vec* state, float* out) {
  using Vec = typename Format::Vec;
  Vec total[M][R];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < R; ++n) total[m][n] = block.first ? Format::zero() : state[m * R + n];
  }
  if constexpr (kScaled) {
    for (int64_t k = block.begin; k < block.end; k += kScaleBlock) {
      Vec acc[M][R];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < R; ++n) acc[m][n] = Format::zero();
      }
      const int64_t end = k + kScaleBlock < block.end ? k + kScaleBlock : block.end;
      multiply<Format, M, R, kAhead>(x, block, k, end, acc);
      const Vec factor = Format::broadcast(block.scale[k / kScaleBlock] * Format::kUnit);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < R; ++n) total[m][n] = Format::scale_add(acc[m][n], factor, total[m][n]);
      }
    }
  } else {
    multiply<Format, M, R, kAhead>(x, block, block.begin, block.end, total);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    if (block.last) {
#pragma GCC unroll 2
      for (int n = 0; n < R; n += kTileRows) Format::store_sums(&total[m][n], out + m * kRows + n);
    } else {
#pragma GCC unroll 8
      for (int n = 0; n < R; ++n) state[m * R + n] = total[m][n];
    }
  }
}

template <typename Format, int R, bool kScaled, Ahead kAhead>
inline void tile_of(int64_t tokens, const char* const* x, const Block<Format>& block, typename Format::Vec* state,
                    float* out) {
  constexpr int kMost = R == kTileRows ? Format::kMaxTokens : Format::kWideTokens;
  static_assert(kMost >= 2 && kMost <= 6, "add the case below");
  static_assert(Format::kTileTokens <= Format::kMaxTokens, "tiles among several are no larger");
  switch (tokens) {
    case 1: return tile<Format, 1, R, kScaled, kAhead>(x, block, state, out);
    case 2: return tile<Format, 2, R, kScaled, kAhead>(x, block, state, out);
    case 3:
      if constexpr (kMost >= 3) return tile<Format, 3, R, kScaled, kAhead>(x, block, state, out);
      break;
    case 4:
      if constexpr (kMost >= 4) return tile<Format, 4, R, kScaled, kAhead>(x, block, state, out);
      break;
    case 5:
      if constexpr (kMost >= 5) return tile<Format, 5, R, kScaled, kAhead>(x, block, state, out);
      break;
    case 6:
      if constexpr (kMost >= 6) return tile<Format, 6, R, kScaled, kAhead>(x, block, state, out);
      break;
    default: break;
  }
  __builtin_unreachable();
}

template <typename Format, int R, Ahead kAhead>
inline void multiply_tile(int64_t tokens, const char* const* x, const Block<Format>& block,
                          typename Format::Vec* state, float* out) {
  if (block.scale) {
    tile_of<Format, R, true, kAhead>(tokens, x, block, state, out);
  } else {
    tile_of<Format, R, false, kAhead>(tokens, x, block, state, out);
  }
}

// 16 rows of weights of one expert.
template <typename Format>
struct WeightRows {
  const typename Format::Weight* w;
  int64_t row_stride;
  int64_t columns;     // K, a multiple of kSizeMultiple
  const float* scale;  // one factor per 128 of k, or null

  const typename Format::Weight* row(int64_t n) const { return w + n * row_stride; }
};

// What a thread needs for its dot products.
template <typename Format>
struct DotScratch {
  typename Format::Decoded::Vec* state;       // [kChunkTokens * kWideRows]
  typename Format::Decoded::Weight* decoded;  // kTileRows rows; unused where Format does not decode
  int64_t decoded_stride;
};

// Memory to fetch meanwhile: `bytes` from `cursor` on; null: none.
struct Fetch {
  const char* cursor;
  int64_t bytes;
};

// One register tile of tokens over four rows: out[t * kRows + n], n < 4. `ahead`: the first of four rows further on,
// laid out like these, or null. Rows without gaps may be fetched one after the other: to memory that is one stream,
// which it reads faster than four.
template <typename Format>
void dot_few(const char* const* x, int64_t tokens, const WeightRows<Format>& rows, const char* ahead,
             typename Format::Vec* state, float* out) {
  Block<Format> block{};
  block.w = rows.w;
  block.row_stride = rows.row_stride;
  block.end = rows.columns;
  block.first = block.last = true;
  block.scale = rows.scale;
  block.ahead = ahead;
  constexpr int64_t kElementBytes = sizeof(typename Format::Weight);
  const bool one_stream = Format::kFetchesRowByRow && rows.row_stride == rows.columns;
  block.ahead_bytes = (one_stream ? kTileRows : 1) * Format::kStep * kElementBytes;
  block.line_bytes = one_stream ? kLineBytes : rows.row_stride * kElementBytes;
  if (ahead) {
    multiply_tile<Format, kTileRows, Ahead::kRows>(tokens, x, block, state, out);
  } else {
    multiply_tile<Format, kTileRows, Ahead::kNothing>(tokens, x, block, state, out);
  }
}

// The same for more tokens than one tile takes, over R rows. kAhead: how `fetch` is fetched.
template <typename Format, int R, Ahead kAhead>
void dot_many(const char* const* x, int64_t tokens, const WeightRows<Format>& rows, Fetch fetch,
              typename Format::Vec* state, float* out) {
  constexpr int kTokens = R == kTileRows ? Format::kTileTokens : Format::kWideTokens;
  const int64_t tiles = (tokens + kTokens - 1) / kTokens;
  const int64_t step_bytes = fetch.bytes / (tiles * (rows.columns / Format::kStep) + 1) + 1;
  // Two lines per step must do; more would leave gaps.
  const char* ahead = step_bytes <= 2 * kLineBytes ? fetch.cursor : nullptr;
  for (int64_t begin = 0; begin < rows.columns; begin += kBlockColumns) {
    Block<Format> block{};
    block.w = rows.w;
    block.row_stride = rows.row_stride;
    block.begin = begin;
    block.end = begin + kBlockColumns < rows.columns ? begin + kBlockColumns : rows.columns;
    block.first = begin == 0;
    block.last = block.end == rows.columns;
    block.scale = rows.scale;
    block.ahead_bytes = step_bytes;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t m = t * tokens / tiles, count = (t + 1) * tokens / tiles - m;
      block.ahead = ahead;
      if (ahead) {
        multiply_tile<Format, R, kAhead>(count, x + m, block, state + m * R, out + m * kRows);
        ahead += block.steps() * step_bytes;
      } else {
        multiply_tile<Format, R, Ahead::kNothing>(count, x + m, block, state + m * R, out + m * kRows);
      }
    }
  }
}

// out[t * kRows + n] = x[t] . row n, for up to kChunkTokens tokens. `next`: the 16 rows wanted after these, or null.
template <typename Format>
void dot_rows(const char* const* x, int64_t tokens, const WeightRows<Format>& rows,
              const typename Format::Weight* next, const DotScratch<Format>& scratch, float* out) {
  using Decoded = typename Format::Decoded;
  static_assert(Format::kMaxTokens >= Decoded::kTileTokens, "decoded rows are for several tiles");
  constexpr int64_t kElementBytes = sizeof(typename Format::Weight);
  const int64_t row_bytes = rows.row_stride * kElementBytes;
  const bool one_tile = tokens <= Format::kMaxTokens;
  const bool wide = Format::kWideTokens > 0 && tokens >= kWideFromTokens;
  const int64_t step = wide ? kWideRows : kTileRows;
  int64_t rows_ahead = kAheadBytes / (rows.columns * kElementBytes) / kTileRows * kTileRows;
  if (rows_ahead < step) rows_ahead = step;
  if (rows_ahead > kRows) rows_ahead = kRows;
  for (int64_t r = 0; r < kRows; r += step) {
    const int64_t later = r + rows_ahead;
    const typename Format::Weight* ahead = rows.row(later);
    if (later >= kRows) ahead = next ? next + (later - kRows) * rows.row_stride : nullptr;
    WeightRows<Format> these = rows;
    these.w = rows.row(r);
    if (one_tile) {
      dot_few<Format>(x, tokens, these, reinterpret_cast<const char*>(ahead), scratch.state, out + r);
      continue;
    }
    Fetch fetch{reinterpret_cast<const char*>(ahead), step * row_bytes};
    if constexpr (Format::kDecodes) {
      const int64_t half = row_bytes / 2 / kLineBytes * kLineBytes;
      for (int n = 0; n < kTileRows; ++n) {
        Format::decode_row(these.row(n), rows.columns, scratch.decoded + n * scratch.decoded_stride, fetch.cursor);
        if (fetch.cursor) fetch = {fetch.cursor + half, fetch.bytes - half};
      }
      const WeightRows<Decoded> decoded{scratch.decoded, scratch.decoded_stride, rows.columns, rows.scale};
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
