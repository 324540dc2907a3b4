// Dot products of many tokens with 16 rows of weights, for any instruction set and any pair of dtypes.
//
// A dot product keeps its partial sums in the lanes of one register, lanes along K. So the rows are read as
// they lie in memory, and nothing is ever repacked:
//
//               k ->
//   x rows    |====|====|====|   M tokens --+
//                                           +--> acc[m][n] += x[m][k..] * w[n][k..]   (one register each)
//   w rows    |====|====|====|   4 rows   --+        | lanes summed in a fixed order
//                                                    v
//                                                out[m][n]   (FP32)
//
// Few tokens (one register tile of them): each row is streamed once, the next four are prefetched.
// More tokens: K is cut into blocks, so that the block of 16 rows stays in the L1 cache while all tokens
// pass over it; the registers of partial sums wait in `state` between blocks. Both ways add the products of
// a (token, row) in the same order, so a token's result does not depend on the rest of the batch.
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
// Columns per block of K, and tokens whose partial sums wait together. Chosen by measurement on a core with
// 48 KiB of L1 and 1 MiB of L2: shorter blocks spend more on saving partial sums than the L1 gives back.
constexpr int64_t kBlockColumns = 2048;
constexpr int64_t kChunkTokens = 32;

// acc[m][n] += x[m] . w[n] over [k_begin, k_end), and prefetch of as much from `next` (null: none).
template <typename Format, int M, bool Prefetch>
inline __attribute__((always_inline)) void multiply(const char* const* x, const typename Format::Weight* w,
                                                    int64_t row_stride, int64_t k_begin, int64_t k_end,
                                                    const typename Format::Weight* next,
                                                    typename Format::Vec (&acc)[M][kTileRows]) {
  int64_t k = k_begin;
  for (; k + Format::kStep <= k_end; k += Format::kStep) {
    if constexpr (Prefetch) {
#pragma GCC unroll 4
      for (int n = 0; n < kTileRows; ++n) __builtin_prefetch(next + n * row_stride + k);
    }
#pragma GCC unroll 2
    for (int part = 0; part < Format::kParts; ++part) {
      typename Format::Operand a[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) a[m] = Format::activation(x[m], k, part);
#pragma GCC unroll 4
      for (int n = 0; n < kTileRows; ++n) {
        const typename Format::Operand b = Format::weight(w + n * row_stride + k, part);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) acc[m][n] = Format::multiply_add(a[m], b, acc[m][n]);
      }
    }
  }
  if constexpr (Format::kStep > kSizeMultiple) {
    if (k == k_end) return;
#pragma GCC unroll 2
    for (int part = 0; part < Format::kParts; ++part) {
#pragma GCC unroll 4
      for (int n = 0; n < kTileRows; ++n) {
        const typename Format::Operand b = Format::weight_tail(w + n * row_stride + k, part, k_end - k);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          acc[m][n] = Format::multiply_add(Format::activation_tail(x[m], k, part, k_end - k), b, acc[m][n]);
        }
      }
    }
  }
}

// One block of K of a dot product, and what is needed around it.
template <typename Format>
struct Block {
  const typename Format::Weight* w;  // first of 4 rows, at k = 0
  int64_t row_stride;
  int64_t begin, end;                   // of K
  bool first, last;                     // of the blocks of K
  const float* scale;                   // one factor per 128 of k, or null
  const typename Format::Weight* next;  // what to prefetch, addressed like w; or null
};

// M tokens x 4 rows: out[m * kRows + n], or the partial sums in `state` before the last block.
template <typename Format, int M>
void tile(const char* const* x, const Block<Format>& block, typename Format::Vec* state, float* out) {
  using Vec = typename Format::Vec;
  Vec total[M][kTileRows];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kTileRows; ++n) total[m][n] = block.first ? Format::zero() : state[m * kTileRows + n];
  }
  if (block.scale == nullptr) {
    if (block.next) {
      multiply<Format, M, true>(x, block.w, block.row_stride, block.begin, block.end, block.next, total);
    } else {
      multiply<Format, M, false>(x, block.w, block.row_stride, block.begin, block.end, nullptr, total);
    }
  } else {
    for (int64_t k = block.begin; k < block.end; k += kScaleBlock) {
      Vec acc[M][kTileRows];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int n = 0; n < kTileRows; ++n) acc[m][n] = Format::zero();
      }
      const int64_t end = k + kScaleBlock < block.end ? k + kScaleBlock : block.end;
      if (block.next) {
        multiply<Format, M, true>(x, block.w, block.row_stride, k, end, block.next, acc);
      } else {
        multiply<Format, M, false>(x, block.w, block.row_stride, k, end, nullptr, acc);
      }
      const Vec factor = Format::broadcast(block.scale[k / kScaleBlock] * Format::kUnit);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int n = 0; n < kTileRows; ++n) total[m][n] = Format::scale_add(acc[m][n], factor, total[m][n]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    if (block.last) {
      Format::store_sums(total[m], out + m * kRows);
    } else {
#pragma GCC unroll 4
      for (int n = 0; n < kTileRows; ++n) state[m * kTileRows + n] = total[m][n];
    }
  }
}

template <typename Format>
inline void tile_of(int tokens, const char* const* x, const Block<Format>& block, typename Format::Vec* state,
                    float* out) {
  static_assert(Format::kMaxTokens <= 6, "add the case below");
  switch (tokens) {
    case 1: return tile<Format, 1>(x, block, state, out);
    case 2: return tile<Format, 2>(x, block, state, out);
    case 3: return tile<Format, 3>(x, block, state, out);
    case 4:
      if constexpr (Format::kMaxTokens >= 4) return tile<Format, 4>(x, block, state, out);
      break;
    case 5:
      if constexpr (Format::kMaxTokens >= 5) return tile<Format, 5>(x, block, state, out);
      break;
    case 6:
      if constexpr (Format::kMaxTokens >= 6) return tile<Format, 6>(x, block, state, out);
      break;
    default: break;
  }
  __builtin_unreachable();
}

// 16 rows of weights of one expert.
template <typename Format>
struct WeightRows {
  const typename Format::Weight* w;
  int64_t row_stride;
  int64_t columns;     // K, a multiple of kSizeMultiple
  const float* scale;  // one factor per 128 of k, or null
};

// out[t * kRows + n] = x[t] . row n, for `tokens` <= kChunkTokens. `next`: the 16 rows that will be wanted
// after these, or null. `state`: kChunkTokens * kRows registers.
template <typename Format>
void dot_rows(const char* const* x, int64_t tokens, const WeightRows<Format>& rows,
              const typename Format::Weight* next, typename Format::Vec* state, float* out) {
  constexpr int64_t kStepRows = kTileRows;
  const int64_t four = kStepRows * rows.row_stride;
  if (tokens <= Format::kMaxTokens) {
    for (int r = 0; r < kRows / kTileRows; ++r) {
      const bool more = r + 1 < kRows / kTileRows;
      Block<Format> block{rows.w + r * four, rows.row_stride, 0,    rows.columns, true, true,
                          rows.scale,        more ? rows.w + (r + 1) * four : next};
      tile_of<Format>(static_cast<int>(tokens), x, block, state, out + r * kTileRows);
    }
    return;
  }
  const int64_t tiles = (tokens + Format::kMaxTokens - 1) / Format::kMaxTokens;
  for (int64_t begin = 0; begin < rows.columns; begin += kBlockColumns) {
    const bool last = begin + kBlockColumns >= rows.columns;
    const int64_t end = last ? rows.columns : begin + kBlockColumns;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t m_begin = t * tokens / tiles, m_end = (t + 1) * tokens / tiles;
      for (int r = 0; r < kRows / kTileRows; ++r) {
        const typename Format::Weight* ahead = nullptr;
        if (t == 0) ahead = !last ? rows.w + r * four + kBlockColumns : next ? next + r * four - begin : nullptr;
        Block<Format> block{rows.w + r * four, rows.row_stride, begin, end, begin == 0, last, rows.scale, ahead};
        tile_of<Format>(static_cast<int>(m_end - m_begin), x + m_begin, block,
                        state + (m_begin * kRows + r * (m_end - m_begin) * kTileRows), out + m_begin * kRows + r * kTileRows);
      }
    }
  }
}

}  // namespace
}  // namespace moeopt
