// Launches a kernel: raises its shared-memory limit, sets the attributes, turns an error into an exception.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "launch/arguments.h"

namespace moeopt {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // the error is reported here; the next check must not see it again
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status));
}

struct LaunchShape {
  dim3 grid;
  int threads;
  int shared_bytes;
  cudaStream_t stream;
  unsigned cluster_blocks = 1;
};

template <typename... Parameters, typename... Arguments>
void launch_kernel(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape,
                   const Arguments&... arguments) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes), name);
  // Programmatic dependent launch: the kernel may start before its predecessor in the stream has ended. Every kernel
  // executes griddepcontrol_wait before it touches memory that another one reads or writes.
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {shape.cluster_blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = shape.stream;
  config.attrs = attributes;
  config.numAttrs = shape.cluster_blocks > 1 ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

// Small batches: router (with logits), then two launches of which the second starts early.
void run_experts(Problem problem, const DirectWorkspace& workspace, const DirectLaunch& launch, cudaStream_t stream);
// Router (with logits), routing, token preparation, both grouped GEMMs, combine.
void run_experts(Problem problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch, cudaStream_t stream);

// Starts the gate, the first launch of every call from logits. Returns the problem with the ids and weights it writes.
Problem launch_router(const Problem& problem, int* topk_ids, float* topk_weights, cudaStream_t stream);

// Encodes a tensor map for TMA: boxes of 128 rows x 128 bytes, 128-byte swizzle, zeros outside. Host work only (about a
// microsecond). The driver's encoder is looked up at run time: nothing links against the driver library, so the
// extension loads on a machine without one.
CUtensorMap encode_tensor_map(const WeightView& view);

}  // namespace moeopt
