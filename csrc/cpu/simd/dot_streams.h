// Dot products of the tokens of one register tile with the rows of a task.
//
//   rows    | quarter 0 | quarter 1 | quarter 2 | quarter 3 |      a tile: one row of each quarter,
//             ^ r ->      ^           ^           ^                then the next row of each
//
// So few tokens are multiplied faster than their weights arrive, and memory is read fastest as a few long streams: the
// processor recognises each of the four and prefetches by itself. Four adjacent rows with prefetch hints were slower.
// It does not know that a stream ends, nor where the next one begins: hints do (`next`), and those of scales of groups,
// which are short streams of their own.
//
// Internal linkage: see number_formats.h.
#pragma once

#include "register_tile.h"

namespace moeopt {
namespace {

// How many rows before its own a row's scales of groups are fetched.
constexpr int64_t kGroupRowsAhead = 16;

// As numbers: the two may lie in different tensors.
inline int64_t bytes_between(const void* from, const void* to) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from));
}

// out[t * out_stride + i] = x[t] . row first + i * step, for i < count (a multiple of kTileRows) and up to
// Format::kMaxTokens tokens. `next`: as many rows, as far apart, that are wanted after these, or null. `state`: as in
// DotScratch.
template <typename Format>
void dot_streams(const char* const* x, int64_t tokens, const WeightMatrix<Format>& matrix, int64_t first, int64_t step,
                 int64_t count, const WeightRows<Format>* next, typename Format::Vec* state, float* out,
                 int64_t out_stride) {
  const WeightRows<Format> rows = matrix.unit(first, step);
  const int64_t quarter = count / kTileRows;
  const int64_t ahead_bytes = Format::row_ahead_bytes(static_cast<int>(tokens));
  const int64_t rows_ahead = ahead_bytes / rows.stored_bytes();
  // Row `later` of the first stream; beyond its end a row of the stream that comes next, or where none does, its last.
  const auto row_at = [&](int64_t later) {
    if (later < quarter) return rows.from(later);
    return next ? next->from(later - quarter) : rows.from(quarter - 1);
  };
  Block<Format> block{};
  block.row_stride = quarter * rows.row_stride;
  block.end = matrix.columns;
  block.first = block.last = true;
  block.ahead_bytes = ahead_bytes;
  const bool scaled = Format::kGroupScales || matrix.row_scale(first) != nullptr;
  for (int64_t r = 0; r < quarter; ++r) {
    float sums[Format::kMaxTokens * kRows];
    block.w = rows.row(r);
    for (int n = 0; scaled && n < kTileRows; ++n) {
      const int64_t row = first + (r + n * quarter) * step;
      block.scale[n] = matrix.row_scale(row);
      block.groups[n] = matrix.groups.from(row);
    }
    // A row that is longer than the distance is fetched as the stream goes on.
    if (rows_ahead > 0) block.ahead_bytes = bytes_between(block.w, row_at(r + rows_ahead).w);
    if constexpr (Format::kGroupScales) {
      const WeightRows<Format> later = row_at(r + kGroupRowsAhead);
      for (int n = 0; n < kTileRows; ++n) later.groups.from(n * quarter * step).fetch();
    }
    if (block.scale[0]) {
      tile_of<Format, kTileRows, Scaling::kPerRow, Ahead::kRows>(tokens, x, block, state, sums);
    } else {
      tile_of<Format, kTileRows, Scaling::kNone, Ahead::kRows>(tokens, x, block, state, sums);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      for (int n = 0; n < kTileRows; ++n) out[t * out_stride + n * quarter + r] = sums[t * kRows + n];
    }
  }
}

}  // namespace
}  // namespace moeopt
