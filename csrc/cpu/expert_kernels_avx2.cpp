// The experts for avx2: FP32 products of whatever the weights are stored in. Drawing: simd/experts.h.
#include "simd/experts.h"
#include "simd/formats_avx2.h"

namespace moeopt {

const ExpertKernels* avx2_kernels(const FusedExpertsArgs& args) {
  const bool fp8 = args.weight_dtype == DType::kFloat8E4M3;
  switch (args.x_dtype) {
    case DType::kFloat32: return fp8 ? &kExperts<Avx2Float8<float>> : &kExperts<Avx2Float32>;
    case DType::kBFloat16: return fp8 ? &kExperts<Avx2Float8<BFloat16>> : &kExperts<Avx2BFloat16>;
    case DType::kFloat16: return fp8 ? &kExperts<Avx2Float8<Float16>> : &kExperts<Avx2Float16>;
    case DType::kFloat8E4M3: return nullptr;
  }
  return nullptr;
}

}  // namespace moeopt
