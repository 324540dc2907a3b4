// The weights of one expert as the dot products see them. Internal linkage: see number_formats.h.
#pragma once

#include <cstdint>

#include "../expert_kernels.h"

namespace moeopt {
namespace {

constexpr int kRows = kSizeMultiple;

// 16 rows of weights of one expert.
template <typename Format>
struct WeightRows {
  const typename Format::Weight* w;
  int64_t row_stride;
  int64_t columns;           // K, a multiple of kSizeMultiple
  const float* scale;        // one factor per 128 of k, or null
  const uint8_t* exponents;  // of the first row, one per 32 of k; null without Format::kGroupScales
  int64_t exponents_stride;

  const typename Format::Weight* row(int64_t n) const { return w + n * row_stride; }
  // The same from row n on.
  WeightRows from(int64_t n) const {
    return {row(n), row_stride, columns, scale, exponents + n * exponents_stride, exponents_stride};
  }
};

// One of the two weight tensors.
template <typename Format>
struct WeightMatrix {
  const typename Format::Weight* weight;  // of the expert
  int64_t row_stride, rows, columns;
  ScaleKind scale_kind;
  const float* scale;        // of the expert
  const uint8_t* exponents;  // of the expert
  const float* bias;         // of the expert, or null

  static WeightMatrix w13(const FusedExpertsArgs& args, int64_t expert) {
    return make(args.w13, args.w13_expert_stride, args.w13_row_stride, 2 * args.intermediate_size, args.hidden_size,
                args.scale_kind, args.w13_scale, args.w13_exponents, args.w13_bias, expert);
  }
  static WeightMatrix w2(const FusedExpertsArgs& args, int64_t expert) {
    return make(args.w2, args.w2_expert_stride, args.w2_row_stride, args.hidden_size, args.intermediate_size,
                args.scale_kind, args.w2_scale, args.w2_exponents, args.w2_bias, expert);
  }

  const typename Format::Weight* row(int64_t index) const { return weight + index * row_stride; }
  // The block scales of a row, one per 128 columns; null without block scales.
  const float* row_scale(int64_t index) const {
    if (scale_kind != ScaleKind::kBlock128) return nullptr;
    return scale + index / kScaleBlock * ((columns + kScaleBlock - 1) / kScaleBlock);
  }

  // The exponents of a row, one per 32 columns; null where there are none.
  const uint8_t* row_exponents(int64_t index) const {
    return Format::kGroupScales ? exponents + index * (columns / kScaleGroup) : nullptr;
  }

  // Unit of the rows first, first + step, ...: its dot products lack the channel scale and the bias.
  WeightRows<Format> unit(int64_t first, int64_t step) const {
    return {row(first),       step * row_stride,    columns,
            row_scale(first), row_exponents(first), Format::kGroupScales ? step * (columns / kScaleGroup) : 0};
  }

  // What turns the dot products of that unit into its outputs: y * factor[n] + bias[n].
  void finish(int64_t first, int64_t step, float* factor, float* offset) const {
    for (int n = 0; n < kRows; ++n) {
      factor[n] = scale_kind == ScaleKind::kChannel ? scale[first + n * step] * Format::kUnit : 1.0f;
      offset[n] = bias ? bias[first + n * step] : 0.0f;
    }
  }

 private:
  static WeightMatrix make(const void* weight, int64_t expert_stride, int64_t row_stride, int64_t rows, int64_t columns,
                           ScaleKind kind, const float* scale, const uint8_t* exponents, const float* bias,
                           int64_t expert) {
    int64_t factors = 0;
    if (kind == ScaleKind::kChannel) factors = rows;
    if (kind == ScaleKind::kBlock128) {
      factors = ((rows + kScaleBlock - 1) / kScaleBlock) * ((columns + kScaleBlock - 1) / kScaleBlock);
    }
    return {static_cast<const typename Format::Weight*>(weight) + expert * expert_stride,
            row_stride,
            rows,
            columns,
            kind,
            scale ? scale + expert * factors : nullptr,
            exponents ? exponents + expert * rows * (columns / kScaleGroup) : nullptr,
            bias ? bias + expert * rows : nullptr};
  }
};

}  // namespace
}  // namespace moeopt
