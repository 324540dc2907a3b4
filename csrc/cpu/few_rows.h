// A product of few rows with a matrix, y = x @ weight.T + bias: reading the matrix is what takes time.
#pragma once

#include <cstdint>

#include "moeopt/fused_experts.h"

namespace moeopt {

// Most rows of x that few_rows_cpu takes.
constexpr int64_t kMostFewRows = 8;

// Strides count elements, from row to row; a row is contiguous.
struct FewRowsArgs {
  int64_t num_rows, in_size, out_size;
  DType dtype;         // of all: FP32, BF16 or FP16
  const void* x;       // [rows, in]
  const void* weight;  // [out, in]
  const void* bias;    // [out], or null
  void* out;           // [rows, out]; shares no memory with the others
  int64_t x_stride, weight_stride, out_stride;
};

// Runs on the OpenMP threads of the caller. The bits of a row depend neither on their number nor on the other rows.
void few_rows_cpu(const FewRowsArgs& args, Isa isa);

}  // namespace moeopt
