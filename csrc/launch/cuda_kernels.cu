#include "launch/cuda_kernels.h"

#include "launch/geometry.h"
#include "launch/launch.cuh"

namespace moeopt {

CallLayout cuda_layout(const Problem& problem, const Variant& variant, int multiprocessors, uintptr_t buffer) {
  return lay_out(problem, variant, multiprocessors, buffer, nullptr);
}

void run_cuda(const Problem& problem, const Variant& variant, int multiprocessors, uintptr_t buffer, int* counters,
              uintptr_t handle) {
  auto* stream = reinterpret_cast<cudaStream_t>(handle);
  const auto run = [&](const auto& layout) { run_experts(problem, layout.workspace, layout.launch, stream); };
  std::visit(run, lay_out(problem, variant, multiprocessors, buffer, counters));
}

}  // namespace moeopt
