// Starts the direct path: router, direct_up_kernel, direct_down_kernel.
#include "launch/launch.cuh"

namespace moeopt {

void run_experts(Problem problem, const DirectWorkspace& workspace, const DirectLaunch& launch, cudaStream_t stream) {
  if (problem.router.logits != nullptr) {
    problem = launch_router(problem, workspace.topk_ids, workspace.topk_weights, stream);
  }
  const bool fp8 = problem.moe.weight_dtype == DType::kFloat8E4M3;
  const DirectArgs args = {problem.moe, workspace.h};
  LaunchShape shape{dim3(static_cast<unsigned>(launch.up_grid)), kDirectUpWarps * 32, launch.up_shared_bytes, stream};
  const auto up = fp8              ? direct_up_kernel<1, kDirectNarrow>
                  : launch.up_wide ? direct_up_kernel<2, kDirectWide>
                                   : direct_up_kernel<2, kDirectNarrow>;
  launch_kernel("direct_up", up, shape, args);
  shape.grid = dim3(static_cast<unsigned>(launch.down_grid));
  shape.threads = kDirectDownWarps * 32;
  shape.shared_bytes = launch.down_shared_bytes;
  const bool once = launch.down_grid == problem.moe.hidden_size / kDirectRows;
  const auto down = fp8 ? (once ? direct_down_kernel<1, true> : direct_down_kernel<1, false>)
                        : (once ? direct_down_kernel<2, true> : direct_down_kernel<2, false>);
  launch_kernel("direct_down", down, shape, args);
}

}  // namespace moeopt
