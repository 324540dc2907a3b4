// The experts for avx512: FP32 products of whatever the weights are stored in. Drawing: simd/experts.h.
#include "simd/experts.h"
#include "simd/formats_avx512.h"

namespace moeopt {

const ExpertKernels* avx512_kernels(const FusedExpertsArgs& args) {
  const bool fp8 = args.weight_dtype == DType::kFloat8E4M3;
  switch (args.x_dtype) {
    case DType::kFloat32: return fp8 ? &kExperts<Avx512Float8<float>> : &kExperts<Avx512Float32>;
    case DType::kBFloat16: return fp8 ? &kExperts<Avx512Float8<BFloat16>> : &kExperts<Avx512BFloat16>;
    case DType::kFloat16: return fp8 ? &kExperts<Avx512Float8<Float16>> : &kExperts<Avx512Float16>;
    case DType::kFloat8E4M3: return nullptr;
  }
  return nullptr;
}

}  // namespace moeopt
