// Starts the direct path: router, direct_up_kernel, direct_down_kernel.
#include "launch/launch.cuh"

namespace moeopt {

void run_experts(Problem problem, const DirectWorkspace& workspace, const DirectLaunch& launch, cudaStream_t stream) {
  if (problem.router.logits != nullptr) {
    problem = launch_router(problem, workspace.topk_ids, workspace.topk_weights, stream);
  }
  const int bits = weight_bits(problem.moe);
  const DirectArgs args = {problem.moe, workspace.h};
  LaunchShape shape{dim3(static_cast<unsigned>(launch.up_grid)), kDirectUpWarps * 32, launch.up_shared_bytes, stream};
  const auto up = bits == 4        ? direct_up_kernel<4, kDirectNarrow>
                  : bits == 8      ? direct_up_kernel<8, kDirectNarrow>
                  : launch.up_wide ? direct_up_kernel<16, kDirectWide>
                                   : direct_up_kernel<16, kDirectNarrow>;
  launch_kernel("direct_up", up, shape, args);
  shape.grid = dim3(static_cast<unsigned>(launch.down_grid));
  shape.threads = kDirectDownWarps * 32;
  shape.shared_bytes = launch.down_shared_bytes;
  const bool once = launch.down_grid == problem.moe.hidden_size / kDirectRows;
  const auto down = bits == 4   ? (once ? direct_down_kernel<4, true> : direct_down_kernel<4, false>)
                    : bits == 8 ? (once ? direct_down_kernel<8, true> : direct_down_kernel<8, false>)
                                : (once ? direct_down_kernel<16, true> : direct_down_kernel<16, false>);
  launch_kernel("direct_down", down, shape, args);
}

}  // namespace moeopt
