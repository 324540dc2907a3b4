// Starts the product of few tokens with a weight matrix.
#include "launch/skinny_gemm.h"

#include "launch/cuda_kernels.h"
#include "launch/launch.cuh"

namespace moeopt {

SkinnyGemmLaunch skinny_gemm_layout(const SkinnyGemmArgs& args, int multiprocessors) {
  return skinny_gemm_launch(args, multiprocessors);
}

void run_skinny_gemm(const SkinnyGemmArgs& args, int multiprocessors, uintptr_t stream) {
  const SkinnyGemmLaunch launch = skinny_gemm_launch(args, multiprocessors);
  const LaunchShape shape{dim3(static_cast<unsigned>(launch.blocks)), launch.threads, launch.shared_bytes,
                          reinterpret_cast<cudaStream_t>(stream)};
  with_skinny_weights(args.weights, [&](auto format) {
    launch_kernel("skinny_gemm", skinny_gemm_kernel<decltype(format)::value>, shape, args);
  });
}

}  // namespace moeopt
