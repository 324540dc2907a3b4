// Dot products of the tokens of one register tile with the rows of a task.
//
//   rows    | quarter 0 | quarter 1 | quarter 2 | quarter 3 |      a tile: one row of each quarter,
//             ^ r ->      ^           ^           ^                then the next row of each
//
// So few tokens are multiplied faster than their weights arrive, and memory is read fastest as a few long streams: the
// processor recognises each of the four and prefetches by itself. Four adjacent rows with prefetch hints were slower.
//
// Internal linkage: see number_formats.h.
#pragma once

#include "register_tile.h"

namespace moeopt {
namespace {

// out[t * out_stride + i] = x[t] . row first + i * step, for i < count (a multiple of kTileRows) and up to
// Format::kMaxTokens tokens. `state`: as in DotScratch.
template <typename Format>
void dot_streams(const char* const* x, int64_t tokens, const WeightMatrix<Format>& matrix, int64_t first, int64_t step,
                 int64_t count, typename Format::Vec* state, float* out, int64_t out_stride) {
  const int64_t quarter = count / kTileRows;
  Block<Format> block{};
  block.row_stride = quarter * step * matrix.row_stride;
  block.end = matrix.columns;
  block.first = block.last = true;
  const bool scaled = Format::kGroupScales || matrix.row_scale(first) != nullptr;
  for (int64_t r = 0; r < quarter; ++r) {
    float sums[Format::kMaxTokens * kRows];
    block.w = matrix.row(first + r * step);
    for (int n = 0; scaled && n < kTileRows; ++n) {
      const int64_t row = first + (r + n * quarter) * step;
      block.scale[n] = matrix.row_scale(row);
      block.groups[n] = matrix.groups.from(row);
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
