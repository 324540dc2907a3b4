// A few rows of x times rows of a matrix, in FP32.
//
//   rows    | quarter 0 | quarter 1 | quarter 2 | quarter 3 |      at a time: one row of each quarter, with all of x
//             ^ r ->      ^           ^           ^
//
// Memory is read fastest as a few long streams, which the processor recognises and fetches ahead: with prefetches of
// our own, 1 to 4 KiB ahead into L1 or L2, one row of x took 1.15 times as long. More rows of x than registers hold
// take the same rows of the matrix again, from cache. `Simd` is an instruction set (activation.h). Internal linkage:
// see number_formats.h.
#pragma once

#include <cstring>

#include "../few_row_kernels.h"
#include "load_fp32.h"

namespace moeopt {
namespace {

constexpr int kStreams = 4;       // store_sums adds up the lanes of four registers
constexpr int kMostTileRows = 3;  // of x: 12 sums, 3 of x and one of the matrix fit 16 registers

// sums[t * kStreams + n] = x[t] . w[n], t < M, n < R: rows of x `x_stride` apart, of the matrix `stream` apart.
template <typename Simd, typename T, int M, int R>
void few_row_tile(const float* x, int64_t x_stride, const T* w, int64_t stream, int64_t columns, float* sums) {
  using Vec = typename Simd::Vec;
  Vec sum[M][kStreams];
#pragma GCC unroll 4
  for (int t = 0; t < M; ++t) {
#pragma GCC unroll 4
    for (int n = 0; n < kStreams; ++n) sum[t][n] = Simd::set1(0.0f);
  }
  const auto add = [&](int64_t k, auto load) __attribute__((always_inline)) {
    Vec row[M];
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) row[t] = Simd::load(x + t * x_stride + k);
#pragma GCC unroll 4
    for (int n = 0; n < R; ++n) {
      const Vec weight = load(w + n * stream + k);
#pragma GCC unroll 4
      for (int t = 0; t < M; ++t) sum[t][n] = Simd::fmadd(row[t], weight, sum[t][n]);
    }
  };
  const auto whole = [](const T* p) { return load_as_fp32<Simd>(p); };
  int64_t k = 0;
#pragma GCC unroll 2
  for (; k + Simd::kLanes <= columns; k += Simd::kLanes) add(k, whole);
  if (k < columns) add(k, [&](const T* p) { return load_part<Simd>(p, columns - k); });
#pragma GCC unroll 4
  for (int t = 0; t < M; ++t) Simd::store_sums(sum[t], sums + t * kStreams);
}

template <typename Simd, typename T, int R>
void few_row_tile_of(int64_t count, const float* x, int64_t x_stride, const T* w, int64_t stream, int64_t columns,
                     float* sums) {
  static_assert(kMostTileRows == 3, "as below");
  switch (count) {
    case 1: return few_row_tile<Simd, T, 1, R>(x, x_stride, w, stream, columns, sums);
    case 2: return few_row_tile<Simd, T, 2, R>(x, x_stride, w, stream, columns, sums);
    default: return few_row_tile<Simd, T, 3, R>(x, x_stride, w, stream, columns, sums);
  }
}

// Rows first + n * step of the matrix, n < R, with all rows of x.
template <typename Simd, typename T, int R>
void few_row_streams(const FewRowsArgs& args, const float* x, int64_t x_stride, int64_t first, int64_t step) {
  const T* w = static_cast<const T*>(args.weight) + first * args.weight_stride;
  const T* bias = static_cast<const T*>(args.bias);
  float sums[kMostFewRows * kStreams];
  for (int64_t t = 0, count; t < args.num_rows; t += count) {
    const int64_t left = args.num_rows - t, tiles = (left + kMostTileRows - 1) / kMostTileRows;
    count = (left + tiles - 1) / tiles;
    few_row_tile_of<Simd, T, R>(count, x + t * x_stride, x_stride, w, step * args.weight_stride, args.in_size,
                                sums + t * kStreams);
  }
  for (int64_t t = 0; t < args.num_rows; ++t) {
    T* out = static_cast<T*>(args.out) + t * args.out_stride + first;
    for (int n = 0; n < R; ++n) {
      const float offset = bias ? to_float(bias[first + n * step]) : 0.0f;
      from_float(sums[t * kStreams + n] + offset, out + n * step);
    }
  }
}

template <typename Simd, typename T>
void multiply_few_rows(const FewRowsArgs& args, const float* x, int64_t x_stride, int64_t begin, int64_t end) {
  const int64_t quarter = (end - begin) / kStreams;
  for (int64_t r = 0; r < quarter; ++r) few_row_streams<Simd, T, kStreams>(args, x, x_stride, begin + r, quarter);
  for (int64_t r = begin + quarter * kStreams; r < end; ++r) few_row_streams<Simd, T, 1>(args, x, x_stride, r, 0);
}

template <typename T>
void widen_row(const void* row, int64_t columns, float* out) {
  for (int64_t k = 0; k < columns; ++k) out[k] = to_float(static_cast<const T*>(row)[k]);
}

template <typename Simd, typename T>
constexpr FewRowKernels kFewRows = {widen_row<T>, multiply_few_rows<Simd, T>};

template <typename Simd>
const FewRowKernels* few_row_kernels(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return &kFewRows<Simd, float>;
    case DType::kBFloat16: return &kFewRows<Simd, BFloat16>;
    case DType::kFloat16: return &kFewRows<Simd, Float16>;
    case DType::kFloat8E4M3:
    case DType::kFloat4E2M1: return nullptr;
  }
  return nullptr;
}

}  // namespace
}  // namespace moeopt
