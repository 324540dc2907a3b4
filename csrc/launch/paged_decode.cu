// Starts the attention of few requests' new tokens to the paged KV cache.
#include "launch/paged_decode.h"

#include "launch/cuda_kernels.h"
#include "launch/launch.cuh"

namespace moeopt {

PagedDecodeLaunch paged_decode_layout(const PagedDecodeArgs& args, int multiprocessors) {
  return paged_decode_launch(args, multiprocessors);
}

void run_paged_decode(const PagedDecodeArgs& args, int multiprocessors, uintptr_t stream) {
  const PagedDecodeLaunch launch = paged_decode_launch(args, multiprocessors);
  const LaunchShape shape{dim3(static_cast<unsigned>(launch.blocks)), launch.threads, launch.shared_bytes,
                          reinterpret_cast<cudaStream_t>(stream)};
  launch_kernel("paged_decode", args.head_size == 64 ? paged_decode_kernel<64> : paged_decode_kernel<128>, shape, args);
}

}  // namespace moeopt
