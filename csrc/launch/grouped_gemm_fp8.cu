// grouped_gemm_kernel with FP8 weights and tokens: its token tiles.
#include "launch/grouped_gemm.cuh"

namespace moeopt {

void launch_gemm_fp8(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch, bool up,
                 cudaStream_t stream) {
  constexpr GemmMode kMode = GemmMode::kFp8;
  switch (launch.tile_tokens) {
    case 32: return launch_gemms_of<kMode, 32>(problem, workspace, launch, up, stream);
    case 64: return launch_gemms_of<kMode, 64>(problem, workspace, launch, up, stream);
    case 96: return launch_gemms_of<kMode, 96>(problem, workspace, launch, up, stream);
    case 144: return launch_gemms_of<kMode, 144>(problem, workspace, launch, up, stream);
    default: fail_tile(launch);
  }
}

}  // namespace moeopt
