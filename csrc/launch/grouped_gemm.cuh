// Starts grouped_gemm_kernel: one translation unit per mode includes this and instantiates its token tiles.
#pragma once

#include "launch/arguments.h"
#include "launch/launch.cuh"
#include "launch/tensor_map.h"

namespace moeopt {

template <GemmMode kMode, int kTokens>
void launch_gemms_of(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch, bool up,
                     cudaStream_t stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>(launch.grid)), kGemmThreads, launch.shared_bytes, stream,
                          static_cast<unsigned>(launch.cluster_blocks)};
  const TensorMap map0 = encode_tensor_map(weight_view(problem.moe, up ? 0 : 2));
  const TensorMap map1 = up ? encode_tensor_map(weight_view(problem.moe, 1)) : map0;
  if (up) {
    launch_kernel("grouped_gemm (up)", grouped_gemm_kernel<kMode, kTokens, true>, shape, map0, map1,
                  up_arguments(problem, workspace, launch));
  } else {
    launch_kernel("grouped_gemm (down)", grouped_gemm_kernel<kMode, kTokens, false>, shape, map0, map1,
                  down_arguments(problem, workspace, launch));
  }
}

[[noreturn]] inline void fail_tile(const GroupedLaunch& launch) {
  throw std::invalid_argument("grouped_gemm: token tile: got " + std::to_string(launch.tile_tokens) +
                              ", expected one that is compiled for mode " +
                              std::to_string(static_cast<int>(launch.mode)));
}

// One definition per file grouped_gemm_<mode>.cu.
void launch_gemm_bf16(const Problem&, const GroupedWorkspace&, const GroupedLaunch&, bool up, cudaStream_t);
void launch_gemm_fp8_weights(const Problem&, const GroupedWorkspace&, const GroupedLaunch&, bool up, cudaStream_t);
void launch_gemm_fp8(const Problem&, const GroupedWorkspace&, const GroupedLaunch&, bool up, cudaStream_t);

}  // namespace moeopt
