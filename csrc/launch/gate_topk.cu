// Starts the gate product and top-k of few tokens.
#include "launch/gate_topk.h"

#include "launch/cuda_kernels.h"
#include "launch/launch.cuh"

namespace moeopt {

GateTopkLaunch gate_topk_layout(const GateTopkArgs& args, const RouterArgs& router) {
  return gate_topk_launch(args, router);
}

void run_gate_topk(const GateTopkArgs& args, const RouterArgs& router, uintptr_t stream) {
  const GateTopkLaunch launch = gate_topk_launch(args, router);
  const LaunchShape shape{dim3(static_cast<unsigned>(launch.blocks)), launch.threads, launch.shared_bytes,
                          reinterpret_cast<cudaStream_t>(stream)};
  launch_kernel("gate_topk", gate_topk_kernel<>, shape, args, router);
}

}  // namespace moeopt
