// Experts whose weights are INT4: weight = (code - zero) * scale, with a scale and a zero point per group of columns.
//
//   codes   4 bits  [E, rows, K / 2 bytes]  0 to 15, two in a byte, the even column in the low half
//   scale   16 bits [E, rows, K / group]    BF16 or FP16
//   zero    uint8   [E, rows, K / group]    0 to 15; without: 8 everywhere
#pragma once

#include <cstdint>

#include "moeopt/fused_experts.h"

namespace moeopt {

constexpr int kInt4SymmetricZero = 8;

// Of one weight tensor. FusedExpertsArgs::w13_exponents and w2_exponents point to one of these while the kernels of
// INT4 run: that struct belongs to the CUDA kernels too, which have no INT4.
struct Int4Scales {
  const uint16_t* scale;  // contiguous
  const uint8_t* zero;    // contiguous, or null
  int64_t group;          // 32, 64 or 128
  bool scale_is_fp16;     // else BF16

  MOEOPT_FIELDS(scale, zero, group, scale_is_fp16)
};

// fused_experts_cpu for INT4. `args` is as there, but w13 and w2 are codes, with strides in bytes, and its dtype of the
// weights, its scales and its exponents are not read. H and I are multiples of the groups.
bool int4_experts_cpu(const FusedExpertsArgs& args, const Int4Scales& w13, const Int4Scales& w2, Isa isa,
                      RoutingError* error);

}  // namespace moeopt
