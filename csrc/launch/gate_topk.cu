// Starts the gate product and top-k of few tokens: one cluster.
#include "launch/gate_topk.h"

#include "launch/cuda_kernels.h"
#include "launch/launch.cuh"

namespace moeopt {

GateTopkLaunch gate_topk_layout(const GateTopkProblem& problem, const RouterArgs& router) {
  return gate_topk_launch(problem, router);
}

void run_gate_topk(const GateTopkProblem& problem, const RouterArgs& router, uintptr_t handle) {
  const GateTopkLaunch launch = gate_topk_launch(problem, router);
  const GateTopkArgs args = gate_topk_arguments(problem, launch);
  const auto blocks = static_cast<unsigned>(launch.cluster_blocks);
  const LaunchShape shape{dim3(blocks), kGateWarps * 32, launch.shared_bytes, reinterpret_cast<cudaStream_t>(handle),
                          blocks};
  with_gate_kernel(launch, [&](auto halves, auto groups) {
    const auto kernel = gate_topk_kernel<decltype(halves)::value, decltype(groups)::value>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "gate_topk");
    launch_kernel("gate_topk", kernel, shape, args, router);
  });
}

}  // namespace moeopt
