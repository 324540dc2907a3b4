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
// Few tokens (one register tile of them): each row is streamed once, the next four rows are prefetched.
// More tokens: all of them pass over the 16 rows, while the next 16 rows are fetched into the L2 cache, a little
// with every step, so that memory works all the time the multipliers do. K is cut into blocks, so that the
// tokens of a register tile stay in the L1 cache; the registers of partial sums wait in `state` between blocks.
// Both ways add the products of a (token, row) in the same order, so a token's result does not depend on the
// rest of the batch.
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
constexpr int64_t kLineBytes = 64;

// What to fetch while multiplying.
enum class Ahead {
  kNothing,
  kRows,    // the same columns of other 4 rows, into L1
  kStream,  // two lines per step from a cursor, into L2
};

// One block of K of a register tile, and what is needed around it.
template <typename Format>
struct Block {
  const typename Format::Weight* w;  // first of 4 rows, at k = 0
  int64_t row_stride;
  int64_t begin, end;   // of K
  bool first, last;     // of the blocks of K
  const float* scale;   // one factor per 128 of k, or null
  const char* ahead;    // kRows: first of 4 rows, addressed like w; kStream: the cursor at `begin`
  int64_t ahead_bytes;  // kRows: from row to row; kStream: from step to step

  int64_t steps() const { return (end - begin) / Format::kStep; }
};

// Loads `value` once. Left alone, the compiler reads an activation again for each of the 4 rows, as the memory operand
// of the multiplication, and the loads become the limit.
template <typename Operand>
inline __attribute__((always_inline)) void keep_in_register(Operand& value) {
  asm("" : "+v"(value));
}

// acc[m][n] += x[m] . w[n] over [k_begin, k_end).
template <typename Format, int M, Ahead kAhead>
inline __attribute__((always_inline)) void multiply(const char* const* x, const Block<Format>& block, int64_t k_begin,
                                                    int64_t k_end, typename Format::Vec (&acc)[M][kTileRows]) {
  const typename Format::Weight* w = block.w;
  const int64_t row_stride = block.row_stride;
  const char* ahead = block.ahead;
  const int64_t ahead_bytes = block.ahead_bytes;
  if constexpr (kAhead == Ahead::kRows) ahead += k_begin * static_cast<int64_t>(sizeof(typename Format::Weight));
  if constexpr (kAhead == Ahead::kStream) ahead += (k_begin - block.begin) / Format::kStep * ahead_bytes;
  int64_t k = k_begin;
  for (; k + Format::kStep <= k_end; k += Format::kStep) {
    if constexpr (kAhead == Ahead::kRows) {
#pragma GCC unroll 4
      for (int n = 0; n < kTileRows; ++n) __builtin_prefetch(ahead + n * ahead_bytes, 0, 3);
      ahead += Format::kStep * sizeof(typename Format::Weight);
    }
    if constexpr (kAhead == Ahead::kStream) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + ahead_bytes / 2, 0, 2);
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
#pragma GCC unroll 4
      for (int n = 0; n < kTileRows; ++n) {
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

// M tokens x 4 rows: out[m * kRows + n], or the partial sums in `state` before the last block.
template <typename Format, int M, Ahead kAhead>
void tile(const char* const* x, const Block<Format>& block, typename Format::Vec* state, float* out) {
  using Vec = typename Format::Vec;
  Vec total[M][kTileRows];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kTileRows; ++n) total[m][n] = block.first ? Format::zero() : state[m * kTileRows + n];
  }
  if (block.scale == nullptr) {
    multiply<Format, M, kAhead>(x, block, block.begin, block.end, total);
  } else {
    for (int64_t k = block.begin; k < block.end; k += kScaleBlock) {
      Vec acc[M][kTileRows];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int n = 0; n < kTileRows; ++n) acc[m][n] = Format::zero();
      }
      const int64_t end = k + kScaleBlock < block.end ? k + kScaleBlock : block.end;
      multiply<Format, M, kAhead>(x, block, k, end, acc);
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

template <typename Format, Ahead kAhead>
inline void tile_of(int64_t tokens, const char* const* x, const Block<Format>& block, typename Format::Vec* state,
                    float* out) {
  static_assert(Format::kMaxTokens <= 6, "add the case below");
  switch (tokens) {
    case 1: return tile<Format, 1, kAhead>(x, block, state, out);
    case 2: return tile<Format, 2, kAhead>(x, block, state, out);
    case 3:
      if constexpr (Format::kMaxTokens >= 3) return tile<Format, 3, kAhead>(x, block, state, out);
      break;
    case 4:
      if constexpr (Format::kMaxTokens >= 4) return tile<Format, 4, kAhead>(x, block, state, out);
      break;
    case 5:
      if constexpr (Format::kMaxTokens >= 5) return tile<Format, 5, kAhead>(x, block, state, out);
      break;
    case 6:
      if constexpr (Format::kMaxTokens >= 6) return tile<Format, 6, kAhead>(x, block, state, out);
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

  const typename Format::Weight* row(int n) const { return w + n * row_stride; }
};

// Memory that will be wanted next: 16 rows of the same layout.
struct NextRows {
  const char* first;  // null: nothing
  int64_t row_bytes;
};

// out[t * kRows + n] = x[t] . row n for one register tile of tokens.
template <typename Format>
void dot_few(const char* const* x, int64_t tokens, const WeightRows<Format>& rows, NextRows next, float* out) {
  for (int r = 0; r < kRows; r += kTileRows) {
    Block<Format> block{};
    block.w = rows.row(r);
    block.row_stride = rows.row_stride;
    block.end = rows.columns;
    block.first = block.last = true;
    block.scale = rows.scale;
    block.ahead = r + kTileRows < kRows ? reinterpret_cast<const char*>(rows.row(r + kTileRows)) : next.first;
    block.ahead_bytes = next.row_bytes;
    if (block.ahead) {
      tile_of<Format, Ahead::kRows>(tokens, x, block, nullptr, out + r);
    } else {
      tile_of<Format, Ahead::kNothing>(tokens, x, block, nullptr, out + r);
    }
  }
}

// The same for up to kChunkTokens tokens. `state`: kChunkTokens * kRows registers.
template <typename Format>
void dot_many(const char* const* x, int64_t tokens, const WeightRows<Format>& rows, NextRows next,
              typename Format::Vec* state, float* out) {
  const int64_t tiles = (tokens + Format::kMaxTokens - 1) / Format::kMaxTokens;
  const int64_t steps = tiles * (kRows / kTileRows) * (rows.columns / Format::kStep) + 1;
  // The next rows, spread over all steps; whole cache lines would leave gaps if two per step were not enough.
  const int64_t ahead_bytes = kRows * next.row_bytes / steps + 1;
  const char* ahead = ahead_bytes <= 2 * kLineBytes ? next.first : nullptr;
  for (int64_t begin = 0; begin < rows.columns; begin += kBlockColumns) {
    Block<Format> block{};
    block.row_stride = rows.row_stride;
    block.begin = begin;
    block.end = begin + kBlockColumns < rows.columns ? begin + kBlockColumns : rows.columns;
    block.first = begin == 0;
    block.last = block.end == rows.columns;
    block.scale = rows.scale;
    block.ahead_bytes = ahead_bytes;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t m_begin = t * tokens / tiles, count = (t + 1) * tokens / tiles - m_begin;
      for (int r = 0; r < kRows; r += kTileRows) {
        block.w = rows.row(r);
        block.ahead = ahead;
        typename Format::Vec* tile_state = state + m_begin * kRows + r * count;
        float* tile_out = out + m_begin * kRows + r;
        if (ahead) {
          tile_of<Format, Ahead::kStream>(count, x + m_begin, block, tile_state, tile_out);
          ahead += block.steps() * ahead_bytes;
        } else {
          tile_of<Format, Ahead::kNothing>(count, x + m_begin, block, tile_state, tile_out);
        }
      }
    }
  }
}

}  // namespace
}  // namespace moeopt
