// The experts for avx512, with FP32 products. Drawing: simd/experts.h.
#include "simd/formats_avx512.h"

namespace moeopt {

const ExpertKernels* avx512_kernels(const FusedExpertsArgs& args) {
  return fp32_kernels<Avx512, Avx512BFloat16, Avx512Float8, Avx512Float4>(args);
}

const ExpertKernels* avx512_int4_kernels(DType x_dtype) { return kernels_of_x<Avx512Int4>(x_dtype); }

}  // namespace moeopt
