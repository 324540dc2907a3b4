// The interface of one instruction set: a few rows times a part of a matrix. few_rows.cpp decides which thread computes
// which part. No standard containers here: see expert_kernels.h.
#pragma once

#include <cstdint>

#include "few_rows.h"

namespace moeopt {

// Columns of `in_size` rounded up to this are read of x, zeros behind its own.
constexpr int64_t kFewRowPad = 16;

// out[:, begin:end) of `args`, whose x is given as FP32 rows `x_stride` apart.
using MultiplyFewRows = void (*)(const FewRowsArgs& args, const float* x, int64_t x_stride, int64_t begin, int64_t end);
// FP32 [columns] of a row of x.
using WidenRow = void (*)(const void* row, int64_t columns, float* out);

struct FewRowKernels {
  WidenRow widen;
  MultiplyFewRows multiply;
};

// Null for dtypes outside the contract.
const FewRowKernels* generic_few_rows(DType dtype);
const FewRowKernels* avx2_few_rows(DType dtype);
const FewRowKernels* avx512_few_rows(DType dtype);

}  // namespace moeopt
