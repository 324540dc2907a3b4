#include "launch/launch.cuh"
#include "moeopt/router.cuh"

namespace moeopt {

Problem launch_router(const Problem& problem, int* topk_ids, float* topk_weights, cudaStream_t stream) {
  const FusedExpertsArgs& moe = problem.moe;
  const int columns = static_cast<int>(router_columns(moe));
  const unsigned blocks = static_cast<unsigned>((moe.num_tokens + kRouterWarps - 1) / kRouterWarps);
  const LaunchShape shape{dim3(blocks), kRouterWarps * 32, router_shared_bytes(moe), stream};
  launch_kernel("route_tokens", route_tokens_kernel<>, shape, problem.router, static_cast<int>(moe.num_tokens), columns,
                static_cast<int>(moe.top_k), topk_ids, topk_weights);
  return with_routed_ids(problem, topk_ids, topk_weights);
}

}  // namespace moeopt
