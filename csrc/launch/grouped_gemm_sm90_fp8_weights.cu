// grouped_gemm_kernel with FP8 weights and BF16 tokens.
#include "launch/grouped_gemm_sm90.cuh"

namespace moeopt {

void launch_gemms_fp8_weights(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                              cudaStream_t stream) {
  launch_gemms<GemmMode::kFp8Weights>(problem, workspace, launch, stream);
}

}  // namespace moeopt
