// grouped_gemm_kernel with MXFP4 weights and BF16 tokens.
#include "launch/grouped_gemm_sm90.cuh"

namespace moeopt {

void launch_gemms_mxfp4_weights(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                                cudaStream_t stream) {
  if (launch.trial == 12) return launch_ahead_mxfp4(problem, workspace, launch, stream);
  if (launch.trial >= 7) return launch_trials_of_weights(problem, workspace, launch, stream);
  launch_gemms<GemmMode::kMxfp4Weights>(problem, workspace, launch, stream);
}

}  // namespace moeopt
