// The weights of one expert as the dot products see them. Internal linkage: see number_formats.h.
#pragma once

#include <cstdint>

#include "../expert_kernels.h"
#include "../int4_experts.h"

namespace moeopt {
namespace {

constexpr int kRows = kSizeMultiple;

constexpr int64_t kLineBytes = 64;

// Hints that this memory is wanted soon.
inline void fetch_bytes(const void* first, int64_t bytes) {
  for (int64_t n = 0; n < bytes; n += kLineBytes) __builtin_prefetch(static_cast<const char*>(first) + n);
}

// What of the groups of a tensor is a constant where a loop is compiled. kSteps: steps of a loop that have one factor.
struct KnownNothing {
  static constexpr int kSteps = 1;
  template <typename Groups>
  void set(Groups& /*groups*/) const {}
};
template <typename HasZero>
struct KnownZero : KnownNothing {
  template <typename Groups>
  void set(Groups& groups) const {
    groups.has_zero = HasZero::value;
  }
};
// `kShift`: Int4Groups::shift. For formats whose step is 64 columns.
template <typename HasZero, typename IsFp16, int kShift>
struct KnownScales {
  static constexpr int kSteps = kShift == 2 ? 2 : 1;
  template <typename Groups>
  void set(Groups& groups) const {
    groups.has_zero = HasZero::value;
    groups.scale_is_fp16 = IsFp16::value;
    groups.shift = kShift;
  }
};

// What MXFP4 has per group of 32 columns, from some row of an expert on. All null in formats without groups.
struct ExponentGroups {
  const uint8_t* exponents;
  int64_t per_row;

  static ExponentGroups of(const uint8_t* exponents, int64_t expert, int64_t rows, int64_t columns) {
    if (!exponents) return {nullptr, 0};
    const int64_t per_row = columns / kScaleGroup;
    return {exponents + expert * rows * per_row, per_row};
  }
  ExponentGroups from(int64_t row) const { return {exponents + row * per_row, per_row}; }
  static constexpr bool kMayHaveZero = false;
  // These, of the same tensor as `other`: what the two have in common is taken from there, and known to be one value,
  // or a constant.
  template <typename Known>
  ExponentGroups beside(const ExponentGroups& /*other*/, Known /*known*/) const {
    return *this;
  }
  // Of this row.
  void fetch() const { fetch_bytes(exponents, per_row); }
};

// The same of INT4.
struct Int4Groups {
  const uint16_t* scale;
  const uint8_t* zero;  // unless has_zero, null
  int64_t per_row;
  int shift;  // from groups of 32 columns to those of the weights
  bool has_zero, scale_is_fp16;

  // `scales`: an Int4Scales.
  static Int4Groups of(const uint8_t* scales, int64_t expert, int64_t rows, int64_t columns) {
    const Int4Scales& tensor = *reinterpret_cast<const Int4Scales*>(scales);
    const int64_t per_row = columns / tensor.group, first = expert * rows * per_row;
    const int shift = tensor.group == 128 ? 2 : tensor.group == 64 ? 1 : 0;
    const bool has_zero = tensor.zero != nullptr;
    const uint8_t* zero = has_zero ? tensor.zero + first : nullptr;
    return {tensor.scale + first, zero, per_row, shift, has_zero, tensor.scale_is_fp16};
  }
  Int4Groups from(int64_t row) const {
    return {scale + row * per_row, has_zero ? zero + row * per_row : nullptr, per_row, shift, has_zero, scale_is_fp16};
  }
  static constexpr bool kMayHaveZero = true;
  template <typename Known>
  Int4Groups beside(const Int4Groups& other, Known known) const {
    Int4Groups groups{scale, zero, other.per_row, other.shift, other.has_zero, other.scale_is_fp16};
    known.set(groups);
    return groups;
  }
  // Of this row.
  void fetch() const {
    fetch_bytes(scale, per_row * 2);
    if (has_zero) fetch_bytes(zero, per_row);
  }
  // The scale's bits and the zero point of the 32 columns from k on, in this row.
  int64_t index(int64_t k) const { return static_cast<int64_t>(static_cast<uint64_t>(k) / kScaleGroup >> shift); }
  uint16_t scale_at(int64_t k) const { return scale[index(k)]; }
  int zero_at(int64_t k) const { return has_zero ? zero[index(k)] : kInt4SymmetricZero; }
};

// 16 rows of weights of one expert.
template <typename Format>
struct WeightRows {
  const typename Format::Weight* w;
  int64_t row_stride;
  int64_t columns;                 // K, a multiple of kSizeMultiple
  const float* scale;              // one factor per 128 of k, or null
  typename Format::Groups groups;  // of the first row
  int64_t step;                    // from row to row, in rows of `groups`

  const typename Format::Weight* row(int64_t n) const { return w + n * row_stride; }
  // Bytes of a row's weights.
  int64_t stored_bytes() const {
    return columns / Format::kColumnsPerElement * static_cast<int64_t>(sizeof(typename Format::Weight));
  }
  // The same from row n on.
  WeightRows from(int64_t n) const { return {row(n), row_stride, columns, scale, groups.from(n * step), step}; }
};

// One of the two weight tensors.
template <typename Format>
struct WeightMatrix {
  const typename Format::Weight* weight;  // of the expert
  int64_t row_stride, rows, columns;
  ScaleKind scale_kind;
  const float* scale;              // of the expert
  typename Format::Groups groups;  // of the expert
  const float* bias;               // of the expert, or null

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

  // Unit of the rows first, first + step, ...: its dot products lack the channel scale and the bias.
  WeightRows<Format> unit(int64_t first, int64_t step) const {
    return {row(first), step * row_stride, columns, row_scale(first), groups.from(first), step};
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
            Format::Groups::of(exponents, expert, rows, columns),
            bias ? bias + expert * rows : nullptr};
  }
};

}  // namespace
}  // namespace moeopt
