// Experts pruned to two of every four weights along K, stored without the zeros.
//
//   values  BF16  [E, rows, K / 2]   the kept weights, in the order of K
//   mask    bits  [E, rows, K / 8]   bit k % 8 of byte k / 8 is set where weight k is kept: two of every four
//
// A row takes 9 bits per pair of columns and expands exactly, so everything after that is dense arithmetic.
#pragma once

#include <cstdint>

#include "moeopt/fused_experts.h"

namespace moeopt {

struct SparseMasks {
  const uint8_t *w13_mask, *w2_mask;

  MOEOPT_FIELDS(w13_mask, w2_mask)
};

// fused_experts_cpu for sparse weights. `args` is as there with BF16 everywhere and without scales and biases, but w13
// and w2 are the values, and all weight tensors are contiguous (the strides in `args` are not read).
bool sparse_experts_cpu(const FusedExpertsArgs& args, const SparseMasks& masks, Isa isa, RoutingError* error);

}  // namespace moeopt
