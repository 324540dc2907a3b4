// grouped_gemm_kernel with BF16 weights and tokens.
#include "launch/grouped_gemm_sm90.cuh"

namespace moeopt {

void launch_gemms_bf16(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                       cudaStream_t stream) {
  launch_gemms<GemmMode::kBf16>(problem, workspace, launch, stream);
}

}  // namespace moeopt
