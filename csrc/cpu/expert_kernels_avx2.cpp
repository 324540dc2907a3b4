// The experts for avx2, with FP32 products. Drawing: simd/experts.h.
#include "simd/formats_avx2.h"

namespace moeopt {

const ExpertKernels* avx2_kernels(const FusedExpertsArgs& args) {
  return fp32_kernels<Avx2, Avx2BFloat16, Avx2Float8>(args);
}

}  // namespace moeopt
