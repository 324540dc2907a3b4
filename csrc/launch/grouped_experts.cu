// Starts the grouped path: router, routing, token preparation, GEMMs, combine.
#include "launch/arguments.h"
#include "launch/cuda_kernels.h"
#include "launch/grouped_gemm.cuh"
#include "launch/launch.cuh"

namespace moeopt {
namespace {

unsigned blocks_for(int64_t work, int64_t per_block) { return static_cast<unsigned>((work + per_block - 1) / per_block); }

void launch_router(const Problem& problem, const GroupedWorkspace& workspace, cudaStream_t stream) {
  constexpr int kWarps = 4;
  const FusedExpertsArgs& moe = problem.moe;
  const int columns = static_cast<int>(router_columns(moe));
  const LaunchShape shape{dim3(blocks_for(moe.num_tokens, kWarps)), kWarps * 32, kWarps * 8 * columns + 1024, stream};
  launch_kernel("route_tokens", route_tokens_kernel<>, shape, problem.router, static_cast<int>(moe.num_tokens), columns,
                static_cast<int>(moe.top_k), workspace.topk_ids, workspace.topk_weights);
}

void launch_routing(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                    cudaStream_t stream) {
  const RouteArgs args = route_arguments(problem, workspace, launch);
  LaunchShape shape{dim3(static_cast<unsigned>(launch.route_blocks)), kRouteThreads, launch.route_shared_bytes, stream};
  launch_kernel("count_pairs", count_pairs_kernel<>, shape, args);
  shape.shared_bytes = 0;
  if (launch.route_blocks > 1) launch_kernel("place_pairs", place_pairs_kernel<>, shape, args);
}

void launch_prepare(const PrepareArgs& args, int grid, cudaStream_t stream) {
  const int64_t groups = args.rows * ((args.depth + 127) / 128), most = int64_t{16} * grid;
  const unsigned blocks = blocks_for(groups, kPrepareThreads / 32);
  const LaunchShape shape{dim3(blocks < most ? blocks : static_cast<unsigned>(most)), kPrepareThreads, 0, stream};
  launch_kernel("prepare_tokens", prepare_tokens_kernel<>, shape, args);
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
    launch_router(problem, workspace, stream);
    problem = with_routed_ids(problem, workspace);
  }
  launch_routing(problem, workspace, launch, stream);
  if (launch.mode != GemmMode::kBf16) launch_prepare(prepare_x(problem, workspace, launch.mode), launch.grid, stream);
  launch_gemm(problem, workspace, launch, true, stream);
  if (launch.mode == GemmMode::kFp8) launch_prepare(prepare_h(problem, workspace), launch.grid, stream);
  launch_gemm(problem, workspace, launch, false, stream);
  launch_combine(problem, workspace, stream);
}

}  // namespace moeopt
