// Starts the grouped path: router, routing and token preparation, GEMMs, combine.
#include "launch/arguments.h"
#include "launch/cuda_kernels.h"
#include "launch/grouped_gemm.cuh"
#include "launch/launch.cuh"
#include "launch/router.h"

namespace moeopt {
namespace {

unsigned blocks_for(int64_t work, int64_t per_block) { return static_cast<unsigned>((work + per_block - 1) / per_block); }

void launch_routing(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                    cudaStream_t stream) {
  const RouteArgs args = route_arguments(problem, workspace, launch);
  LaunchShape shape{dim3(static_cast<unsigned>(launch.route_blocks + launch.prepare_blocks)), kRouteThreads,
                    launch.route_shared_bytes, stream};
  launch_kernel("count_pairs", count_pairs_kernel<>, shape, args, prepare_arguments(problem, workspace, launch.mode));
  if (launch.route_blocks == 1) return;
  shape.grid = dim3(static_cast<unsigned>(launch.route_blocks));
  shape.shared_bytes = 0;
  launch_kernel("place_pairs", place_pairs_kernel<>, shape, args);
}

void launch_combine(const Problem& problem, const GroupedWorkspace& workspace, cudaStream_t stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>(problem.moe.num_tokens),
                               blocks_for(problem.moe.hidden_size, 8 * kCombineThreads)),
                          kCombineThreads, 0, stream};
  launch_kernel("combine", combine_kernel<>, shape, combine_arguments(problem, workspace));
}

}  // namespace

void run_grouped(const Values& problem_values, const Values& workspace_values, const Values& geometry, uintptr_t handle) {
  Problem problem = problem_from_values(problem_values.data(), static_cast<int64_t>(problem_values.size()));
  const GroupedLaunch launch = grouped_launch(geometry.data(), static_cast<int64_t>(geometry.size()));
  const GroupedWorkspace workspace =
      grouped_workspace(workspace_values.data(), static_cast<int64_t>(workspace_values.size()));
  auto* stream = reinterpret_cast<cudaStream_t>(handle);
  const auto launch_gemm = launch.mode == GemmMode::kBf16         ? launch_gemm_bf16
                           : launch.mode == GemmMode::kFp8Weights ? launch_gemm_fp8_weights
                                                                  : launch_gemm_fp8;
  if (problem.router.logits != nullptr) {
    launch_router(problem, workspace.topk_ids, workspace.topk_weights, stream);
    problem = with_routed_ids(problem, workspace.topk_ids, workspace.topk_weights);
  }
  launch_routing(problem, workspace, launch, stream);
  launch_gemm(problem, workspace, launch, true, stream);
  launch_gemm(problem, workspace, launch, false, stream);
  launch_combine(problem, workspace, stream);
}

}  // namespace moeopt
