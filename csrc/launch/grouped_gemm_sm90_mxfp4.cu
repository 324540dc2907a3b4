#include "launch/grouped_gemm_sm90.cuh"

namespace moeopt {

void launch_gemms_mxfp4(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                        cudaStream_t stream) {
  if (launch.trial == 2) return launch_trial2(problem, workspace, launch, stream);
  if (launch.trial == 3) return launch_trial3(problem, workspace, launch, stream);
  if (launch.trial == 4) return launch_trial4(problem, workspace, launch, stream);
  if (launch.trial == 5) return launch_trial5(problem, workspace, launch, stream);
  if (launch.trial == 6) return launch_trial6(problem, workspace, launch, stream);
  launch_gemms<GemmMode::kMxfp4>(problem, workspace, launch, stream);
}

}  // namespace moeopt
