// Starts both grouped GEMMs. One translation unit per mode includes this and instantiates its token tiles.
#pragma once

#include "launch/launch.cuh"
namespace moeopt {

template <GemmMode kMode>
void launch_gemms(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                  cudaStream_t stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>(launch.grid)), kGemmThreads, launch.shared_bytes, stream,
                          static_cast<unsigned>(launch.cluster_blocks)};
  const TensorMap gate = encode_tensor_map(weight_view(problem.moe, 0));
  const TensorMap up = encode_tensor_map(weight_view(problem.moe, 1));
  const TensorMap down = encode_tensor_map(weight_view(problem.moe, 2));
  with_tile(CompiledTiles<kMode>(), launch, [&](auto tile) {
    launch_kernel("grouped_gemm (up)", grouped_gemm_kernel<kMode, decltype(tile)::value, true>, shape, gate, up,
                  up_arguments(problem, workspace, launch));
    launch_kernel("grouped_gemm (down)", grouped_gemm_kernel<kMode, decltype(tile)::value, false>, shape, down, down,
                  down_arguments(problem, workspace, launch));
  });
}

// One definition per file grouped_gemm_sm90_<mode>.cu.
void launch_gemms_bf16(const Problem&, const GroupedWorkspace&, const GroupedLaunch&, cudaStream_t);
void launch_gemms_fp8_weights(const Problem&, const GroupedWorkspace&, const GroupedLaunch&, cudaStream_t);
void launch_gemms_mxfp4_weights(const Problem&, const GroupedWorkspace&, const GroupedLaunch&, cudaStream_t);
void launch_gemms_int4_weights(const Problem&, const GroupedWorkspace&, const GroupedLaunch&, cudaStream_t);
void launch_gemms_mxfp4(const Problem&, const GroupedWorkspace&, const GroupedLaunch&, cudaStream_t);
void launch_gemms_fp8(const Problem&, const GroupedWorkspace&, const GroupedLaunch&, cudaStream_t);

}  // namespace moeopt
