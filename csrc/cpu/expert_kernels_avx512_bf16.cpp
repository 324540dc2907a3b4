// The experts for AVX-512 with BF16 dot products and VBMI; other dtypes as on avx512. Drawing: simd/experts.h.
#include "simd/formats_avx512_bf16.h"

namespace moeopt {

const ExpertKernels* avx512_bf16_kernels(const FusedExpertsArgs& args) {
  if (args.x_dtype != DType::kBFloat16) return avx512_kernels(args);
  return args.weight_dtype == DType::kFloat8E4M3 ? &kExperts<DotFloat8> : &kExperts<DotBFloat16>;
}

}  // namespace moeopt
