// The inner loop: a register tile of M tokens over R rows of weights.
//
// A dot product keeps its partial sums in the lanes of one register, lanes along K, so the rows are read as they are
// stored and nothing is repacked:
//
//               k ->
//   x rows    |====|====|====|   M tokens --+
//                                           +--> acc[m][n] += x[m][k..] * w[n][k..]   (one register each)
//   w rows    |====|====|====|   R rows   --+        | lanes summed in a fixed order
//                                                    v
//                                                out[m][n]   (FP32)
//
// A Format names the dtypes and holds the instructions; see formats_fp32.h. Its distances and tile sizes were chosen by
// measurement. Internal linkage: see number_formats.h.
#pragma once

#include <type_traits>

#include "weight_matrix.h"

namespace moeopt {
namespace {

constexpr int kTileRows = 4;
constexpr int kWideRows = 8;

// Hints of __builtin_prefetch. L2 waits for more lines at a time than L1 does: rows that memory limits are fetched into
// it, though no tile needs them there again.
constexpr int kIntoL1Only = 0, kIntoL2 = 2, kIntoL1AndL2 = 3;

// What to fetch while multiplying.
enum class Ahead {
  kNothing,
  kRows,        // Block::ahead_bytes from where each row is read; dot_streams.h
  kStream,      // one or two lines per step from a cursor, into L1
  kStreamToL2,  // the same, into L2: L1 is taken by decoded rows
};

// Which rows of a tile have the same factors.
enum class Scaling { kNone, kShared, kPerRow };

// One block of K of a register tile.
template <typename Format>
struct Block {
  const typename Format::Weight* w;  // first row, at k = 0
  int64_t row_stride;
  int64_t begin, end;             // of K
  bool first, last;               // of the blocks of K
  const float* scale[kTileRows];  // of each row, one factor per 128 of k; kShared: the first is that of all rows
  typename Format::Groups groups[kTileRows];  // of each row
  const char* ahead;                          // kStream: what the step at `begin` fetches
  int64_t ahead_bytes;                        // kRows: from what is read to what is fetched; kStream: from step to step

  int64_t steps() const { return (end - begin) / Format::kStep; }
};

// Loads `value` once. Otherwise the compiler reads an activation again for each row, as the memory operand of the
// multiplication, and loads become the limit.
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
  const int64_t ahead_bytes = block.ahead_bytes;
  const char* ahead = block.ahead;
  if constexpr (kAhead == Ahead::kStream || kAhead == Ahead::kStreamToL2) {
    ahead += (k_begin - block.begin) / Format::kStep * ahead_bytes;
  }
  int64_t k = k_begin;
  for (; k + Format::kStep <= k_end; k += Format::kStep) {
    if constexpr (kAhead == Ahead::kRows && Format::row_ahead_bytes(M) > 0) {
#pragma GCC unroll 8
      for (int n = 0; n < R; ++n) {
        const char* now = reinterpret_cast<const char*>(w + n * row_stride + k);
        __builtin_prefetch(now + ahead_bytes, 0, kIntoL2);
      }
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

// Up to so many tokens the loops with and without zero points are two. Measured: with more, one is faster.
constexpr int kTokensOfTwoLoops = 3;

// Calls `call` with `value` as a constant.
template <typename Call>
inline void with_constant(bool value, Call call) {
  if (value) return call(std::true_type{});
  call(std::false_type{});
}

// tile() of weights in four bits, whose groups of 32 columns or more have a scale each.
//
// A step of kStep columns of one row is decoded into registers for all M tokens: a vector of each part, lane i of every
// part from the same group, so that one factor per lane scales the sum of the step. No registers are left for sums of
// several rows at a time, and activations come from the L1 cache. `known`: see Groups::beside; where it says that two
// steps have the same factor, they are one.
template <typename Format, int M, Ahead kAhead, typename Known>
void group_tile(const char* const* x, const Block<Format>& block, Known known, typename Format::Vec* state,
                float* out) {
  using Vec = typename Format::Vec;
  constexpr int kSteps = Known::kSteps;
  constexpr int64_t kColumns = kSteps * Format::kStep;
  Vec total[M][kTileRows];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < kTileRows; ++n) total[m][n] = block.first ? Format::zero() : state[m * kTileRows + n];
  }
  typename Format::Groups groups[kTileRows];
  for (int n = 0; n < kTileRows; ++n) groups[n] = block.groups[n].beside(block.groups[0], known);
  const char* ahead = block.ahead;
  const int64_t ahead_bytes = block.ahead_bytes;
  const auto step = [&](int64_t k, auto whole) {
    const int64_t columns = whole ? Format::kStep : block.end - k;
    if constexpr (kAhead == Ahead::kStream) {
      static_assert(kSteps == 1, "the stream is fetched step by step");
      __builtin_prefetch(ahead, 0, kIntoL1AndL2);
      if (ahead_bytes > kLineBytes) __builtin_prefetch(ahead + ahead_bytes / 2, 0, kIntoL1AndL2);
      ahead += ahead_bytes;
    }
#pragma GCC unroll 4
    for (int n = 0; n < kTileRows; ++n) {
      const typename Format::Weight* w = block.w + n * block.row_stride + k / Format::kColumnsPerElement;
      if constexpr (kAhead == Ahead::kRows && Format::row_ahead_bytes(M) > 0) {
        __builtin_prefetch(reinterpret_cast<const char*>(w) + ahead_bytes, 0, kIntoL1Only);
      }
      Vec sum[M][Format::kGroupSums];
#pragma GCC unroll 2
      for (int s = 0; s < kSteps; ++s) {
        const int64_t at = k + s * Format::kStep;
        const typename Format::Weight* now = w + s * Format::kStep / Format::kColumnsPerElement;
        typename Format::Operand weight[Format::kParts];
        Format::decode(whole ? Format::codes(now) : Format::codes_first(now, columns), groups[n], at, columns, weight);
        const Vec factor = Format::factor(groups[n], k, columns);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          Vec(&sums)[Format::kGroupSums] = sum[m];
          for (int i = 0; s == 0 && i < Format::kGroupSums; ++i) sums[i] = Format::zero();
#pragma GCC unroll 8
          for (int part = 0; part < Format::kParts; ++part) {
            const auto activation =
                whole ? Format::activation(x[m], at, part) : Format::activation_tail(x[m], at, part, columns);
            Vec& of_part = sums[part % Format::kGroupSums];
            of_part = Format::multiply_add(activation, weight[part], of_part);
          }
          if (s < kSteps - 1) continue;
          for (int i = 1; i < Format::kGroupSums; ++i) sums[0] = sums[0] + sums[i];
          total[m][n] = Format::scale_add(sums[0], factor, total[m][n]);
        }
      }
    }
  };
  int64_t k = block.begin;
  for (; k + kColumns <= block.end; k += kColumns) step(k, std::true_type{});
  if constexpr (kSteps == 1) {
    if (k < block.end) step(k, std::false_type{});
  }
  for (int m = 0; m < M; ++m) {
    if (block.last) {
      Format::store_sums(total[m], out + m * kRows);
    } else {
      for (int n = 0; n < kTileRows; ++n) state[m * kTileRows + n] = total[m][n];
    }
  }
}

// M tokens x R rows: out[m * kRows + n], or the partial sums in `state` before the last block. With and without
// scales in one function the compiler keeps sums in memory: measured 0.75 of the speed.
template <typename Format, int M, int R, Scaling kScaling, Ahead kAhead>
void tile(const char* const* x, const Block<Format>& block, typename Format::Vec* state, float* out) {
  using Vec = typename Format::Vec;
  if constexpr (Format::kGroupScales) {
    static_assert(R == kTileRows, "decoding takes the registers of more");
    using Groups = typename Format::Groups;
    const Groups& groups = block.groups[0];
    const auto multiply = [&](auto known) { group_tile<Format, M, kAhead>(x, block, known, state, out); };
    if constexpr (Groups::kMayHaveZero && Format::kLoopsByScales && kAhead == Ahead::kRows) {
      with_constant(groups.has_zero, [&](auto has_zero) {
        with_constant(groups.scale_is_fp16, [&](auto is_fp16) {
          if (groups.shift == 2) return multiply(KnownScales<decltype(has_zero), decltype(is_fp16), 2>{});
          if (groups.shift == 1) return multiply(KnownScales<decltype(has_zero), decltype(is_fp16), 1>{});
          multiply(KnownScales<decltype(has_zero), decltype(is_fp16), 0>{});
        });
      });
    } else if constexpr (Groups::kMayHaveZero && M <= kTokensOfTwoLoops) {
      with_constant(groups.has_zero, [&](auto has_zero) { multiply(KnownZero<decltype(has_zero)>{}); });
    } else {
      multiply(KnownNothing{});
    }
  } else {
    Vec total[M][R];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < R; ++n) total[m][n] = block.first ? Format::zero() : state[m * R + n];
    }
    if constexpr (kScaling != Scaling::kNone) {
      for (int64_t k = block.begin; k < block.end; k += kScaleBlock) {
        Vec acc[M][R];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
          for (int n = 0; n < R; ++n) acc[m][n] = Format::zero();
        }
        const int64_t end = k + kScaleBlock < block.end ? k + kScaleBlock : block.end;
        multiply<Format, M, R, kAhead>(x, block, k, end, acc);
        Vec factor = Format::broadcast(block.scale[0][k / kScaleBlock] * Format::kUnit);
#pragma GCC unroll 8
        for (int n = 0; n < R; ++n) {
          if (kScaling == Scaling::kPerRow && n > 0) {
            factor = Format::broadcast(block.scale[n][k / kScaleBlock] * Format::kUnit);
          }
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) total[m][n] = Format::scale_add(acc[m][n], factor, total[m][n]);
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
}

template <typename Format, int R, Scaling kScaling, Ahead kAhead>
inline void tile_of(int64_t tokens, const char* const* x, const Block<Format>& block, typename Format::Vec* state,
                    float* out) {
  constexpr int kMost = R == kTileRows ? Format::kMaxTokens : Format::kWideTokens;
  static_assert(kMost >= 2 && kMost <= 6, "add the case below");
  static_assert(Format::kTileTokens <= Format::kMaxTokens, "tiles among several are no larger");
  switch (tokens) {
    case 1: return tile<Format, 1, R, kScaling, kAhead>(x, block, state, out);
    case 2: return tile<Format, 2, R, kScaling, kAhead>(x, block, state, out);
    case 3:
      if constexpr (kMost >= 3) return tile<Format, 3, R, kScaling, kAhead>(x, block, state, out);
      break;
    case 4:
      if constexpr (kMost >= 4) return tile<Format, 4, R, kScaling, kAhead>(x, block, state, out);
      break;
    case 5:
      if constexpr (kMost >= 5) return tile<Format, 5, R, kScaling, kAhead>(x, block, state, out);
      break;
    case 6:
      if constexpr (kMost >= 6) return tile<Format, 6, R, kScaling, kAhead>(x, block, state, out);
      break;
    default: break;
  }
  __builtin_unreachable();
}

}  // namespace
}  // namespace moeopt
