// grouped_gemm_kernel with INT4 weights and BF16 tokens.
#include "launch/grouped_gemm_sm90.cuh"

namespace moeopt {

void launch_gemms_int4_weights(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                               cudaStream_t stream) {
  launch_gemms<GemmMode::kInt4Weights>(problem, workspace, launch, stream);
}

}  // namespace moeopt
