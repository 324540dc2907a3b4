// grouped_gemm_kernel with FP8 weights and tokens.
#include "launch/grouped_gemm_sm90.cuh"

namespace moeopt {

void launch_gemms_fp8(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                      cudaStream_t stream) {
  launch_gemms<GemmMode::kFp8>(problem, workspace, launch, stream);
}

}  // namespace moeopt
