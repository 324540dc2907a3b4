// grouped_gemm_kernel with MXFP4 weights and FP8 tokens.
#include "launch/grouped_gemm_sm90.cuh"

namespace moeopt {

void launch_gemms_mxfp4(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                        cudaStream_t stream) {
  launch_gemms<GemmMode::kMxfp4>(problem, workspace, launch, stream);
}

}  // namespace moeopt
