// Starts flash_dmoe_decode_kernel, or direct_up_kernel and direct_down_kernel.
#include "launch/arguments.h"
#include "launch/cuda_kernels.h"
#include "launch/launch.cuh"

namespace moeopt {
namespace {

using Kernel = void (*)(DecodeArgs);

template <DecodePhase kPhase>
Kernel kernel_for(const Problem& problem, const DecodeLaunch& launch) {
  const bool fp8 = problem.moe.weight_dtype == DType::kFloat8E4M3;
  if (launch.column_blocks == 1) {
    return fp8 ? flash_dmoe_decode_kernel<1, 1, kPhase> : flash_dmoe_decode_kernel<2, 1, kPhase>;
  }
  return fp8 ? flash_dmoe_decode_kernel<1, 2, kPhase> : flash_dmoe_decode_kernel<2, 2, kPhase>;
}

int blocks_per_multiprocessor(Kernel kernel, const DecodeLaunch& launch) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes),
             "flash_dmoe_decode");
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kDecodeThreads,
                                                           static_cast<size_t>(launch.shared_bytes)),
             "flash_dmoe_decode: occupancy");
  return blocks;
}

// A block that waits for one which cannot start would wait for ever.
void check_resident(Kernel kernel, const DecodeLaunch& launch) {
  int device = 0, multiprocessors = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
  const int blocks = blocks_per_multiprocessor(kernel, launch);
  if (launch.grid > blocks * multiprocessors) {
    throw std::runtime_error("flash_dmoe_decode: grid: got " + std::to_string(launch.grid) + " blocks, expected at most " +
                             std::to_string(blocks) + " per multiprocessor x " + std::to_string(multiprocessors));
  }
}

using DirectKernel = void (*)(DirectArgs);

void run_direct(const Problem& problem, const DirectArgs& args, LaunchShape shape, DecodeStart start) {
  const bool fp8 = problem.moe.weight_dtype == DType::kFloat8E4M3;
  shape.threads = kDirectUpWarps * 32;
  launch_kernel("direct_decode (up)", fp8 ? direct_up_kernel<1> : direct_up_kernel<2>, shape, args);
  shape.grid = dim3(static_cast<unsigned>(problem.moe.hidden_size / 16));
  shape.threads = kDirectDownWarps * 32;
  shape.overlaps_previous = start == DecodeStart::kChained;
  launch_kernel("direct_decode (down)", fp8 ? direct_down_kernel<1> : direct_down_kernel<2>, shape, args);
}

}  // namespace

void run_decode(const Values& problem_values, const Values& workspace, const Values& geometry, uintptr_t stream,
                DecodeStart start) {
  const Problem problem = problem_from_values(problem_values.data(), static_cast<int64_t>(problem_values.size()));
  const DecodeLaunch launch = decode_launch(geometry.data(), static_cast<int64_t>(geometry.size()));
  LaunchShape shape{dim3(static_cast<unsigned>(launch.grid)), kDecodeThreads, launch.shared_bytes,
                    reinterpret_cast<cudaStream_t>(stream)};
  if (launch.is_direct) {
    const DirectArgs args =
        direct_arguments(problem, workspace.data(), static_cast<int64_t>(workspace.size()));
    run_direct(problem, args, shape, start);
    return;
  }
  const DecodeArgs args =
      decode_arguments(problem, workspace.data(), static_cast<int64_t>(workspace.size()), launch);
  if (start == DecodeStart::kCooperative || start == DecodeStart::kPlain) {
    const Kernel kernel = kernel_for<DecodePhase::kBoth>(problem, launch);
    if (start == DecodeStart::kPlain) check_resident(kernel, launch);
    shape.cooperative = start == DecodeStart::kCooperative;
    launch_kernel("flash_dmoe_decode", kernel, shape, args);
    return;
  }
  launch_kernel("flash_dmoe_decode (up)", kernel_for<DecodePhase::kUp>(problem, launch), shape, args);
  shape.overlaps_previous = start == DecodeStart::kChained;
  launch_kernel("flash_dmoe_decode (down)", kernel_for<DecodePhase::kDown>(problem, launch), shape, args);
}

int decode_blocks_per_multiprocessor(const Values& problem_values, const Values& geometry) {
  const Problem problem = problem_from_values(problem_values.data(), static_cast<int64_t>(problem_values.size()));
  const DecodeLaunch launch = decode_launch(geometry.data(), static_cast<int64_t>(geometry.size()));
  return blocks_per_multiprocessor(kernel_for<DecodePhase::kBoth>(problem, launch), launch);
}

}  // namespace moeopt
