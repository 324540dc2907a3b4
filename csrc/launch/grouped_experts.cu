// Starts the grouped path: router, routing and token preparation, GEMMs, combine.
#include "launch/grouped_gemm_sm90.cuh"
#include "launch/launch.cuh"

namespace moeopt {
namespace {

unsigned blocks_for(int64_t work, int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

void launch_routing(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                    cudaStream_t stream) {
  const RouteArgs args = route_arguments(problem, workspace, launch);
  LaunchShape shape{dim3(static_cast<unsigned>(launch.route_blocks + launch.prepare_blocks)), kRouteThreads,
                    launch.route_shared_bytes, stream};
  const auto count_pairs = launch.mode == GemmMode::kMxfp4 ? count_pairs_kernel<true, true>
                           : has_four_bits(launch.mode)    ? count_pairs_kernel<true, false>
                                                           : count_pairs_kernel<false, false>;
  launch_kernel("count_pairs", count_pairs, shape, args, prepare_arguments(problem, workspace, launch.mode));
  if (launch.route_blocks == 1) return;
  shape.grid = dim3(static_cast<unsigned>(launch.route_blocks));
  shape.shared_bytes = 0;
  launch_kernel("place_pairs", place_pairs_kernel<>, shape, args);
}

void launch_combine(const Problem& problem, const GroupedWorkspace& workspace, cudaStream_t stream) {
  const LaunchShape shape{
      dim3(static_cast<unsigned>(problem.moe.num_tokens), blocks_for(problem.moe.hidden_size, 8 * kCombineThreads)),
      kCombineThreads, 0, stream};
  launch_kernel("combine", combine_kernel<>, shape, combine_arguments(problem, workspace));
}

}  // namespace

void run_experts(Problem problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch, cudaStream_t stream) {
  const auto launch_gemms = launch.mode == GemmMode::kBf16          ? launch_gemms_bf16
                            : launch.mode == GemmMode::kFp8Weights  ? launch_gemms_fp8_weights
                            : launch.mode == GemmMode::kFp8         ? launch_gemms_fp8
                            : launch.mode == GemmMode::kInt4Weights ? launch_gemms_int4_weights
                            : launch.mode == GemmMode::kMxfp4       ? launch_gemms_mxfp4
                                                                    : launch_gemms_mxfp4_weights;
  if (problem.router.logits != nullptr) {
    problem = launch_router(problem, workspace.topk_ids, workspace.topk_weights, stream);
  }
  launch_routing(problem, workspace, launch, stream);
  launch_gemms(problem, workspace, launch, stream);
  launch_combine(problem, workspace, stream);
}

}  // namespace moeopt
