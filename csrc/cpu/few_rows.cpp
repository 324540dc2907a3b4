// Tasks and threads of a product of few rows; the arithmetic is in few_row_kernels_*.cpp.
#include "few_rows.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "few_row_kernels.h"
#include "team.h"

namespace moeopt {
namespace {

// Chosen: long enough for the processor to recognise its streams, and for each thread to have several.
constexpr int64_t kTaskBytes = 1 << 19;
constexpr int64_t kTasksOfThread = 4;
constexpr int64_t kTaskRows = 16;  // what it has is a multiple of this
// Reading a weight from memory takes as long as so many products.
constexpr int64_t kProductsOfWeight = 4;

const FewRowKernels* kernels_of(DType dtype, Isa isa) {
#ifdef MOEOPT_X86
  switch (isa) {
    case Isa::kAvx512Bf16:
    case Isa::kAvx512: return avx512_few_rows(dtype);
    case Isa::kAvx2: return avx2_few_rows(dtype);
    case Isa::kGeneric: break;
  }
#else
  (void)isa;
#endif
  return generic_few_rows(dtype);
}

int64_t task_rows(const FewRowsArgs& args, int threads) {
  const int64_t element_bytes = args.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t of_bytes = kTaskBytes / std::max<int64_t>(1, args.in_size * element_bytes);
  const int64_t of_threads = args.out_size / (threads * kTasksOfThread);
  const int64_t rows = threads == 1 ? args.out_size : std::min(of_bytes, of_threads);
  return std::max(kTaskRows, rows / kTaskRows * kTaskRows);
}

}  // namespace

void few_rows_cpu(const FewRowsArgs& args, Isa isa) {
  const FewRowKernels& kernels = *kernels_of(args.dtype, isa);
  const int64_t x_stride = (args.in_size + kFewRowPad - 1) / kFewRowPad * kFewRowPad;
  // Kept: a new one for each product would cost page faults.
  static thread_local std::vector<float> x;
  x.assign(args.num_rows * x_stride, 0.0f);
  const int64_t element_bytes = args.dtype == DType::kFloat32 ? 4 : 2;
  for (int64_t t = 0; t < args.num_rows; ++t) {
    kernels.widen(static_cast<const char*>(args.x) + t * args.x_stride * element_bytes, args.in_size,
                  x.data() + t * x_stride);
  }
  const float* const wide = x.data();
  const int threads = threads_for(args.out_size * args.in_size * std::max(kProductsOfWeight, args.num_rows));
  const int64_t rows = task_rows(args, threads), num_tasks = (args.out_size + rows - 1) / rows;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t task = 0; task < num_tasks; ++task) {
    kernels.multiply(args, wide, x_stride, task * rows, std::min((task + 1) * rows, args.out_size));
  }
}

}  // namespace moeopt
