// The product of few tokens with a weight matrix of csrc/include/moeopt/skinny_gemm.cuh, as emulated_gate.cpp has the
// gate: with the CUDA functions `cuda_skinny_layout` and `cuda_skinny_run`.
#include <pybind11/pybind11.h>

#include "bindings/from_python.h"
#include "emulated_device.h"
#include "launch/skinny_gemm.h"

using namespace moeopt;

namespace {

namespace py = pybind11;

py::dict emulate_layout(const py::dict& gemm, int multiprocessors) {
  return to_python(skinny_gemm_launch(from_python<SkinnyGemmArgs>("gemm", gemm), multiprocessors));
}

void emulate_run(const py::dict& gemm, int multiprocessors, uint64_t seed) {
  const auto args = from_python<SkinnyGemmArgs>("gemm", gemm);
  const SkinnyGemmLaunch launch = skinny_gemm_launch(args, multiprocessors);
  with_skinny_weights(args.weights, [&](auto format) {
    const std::string failure =
        emulation::launch(launch.blocks, launch.threads, static_cast<size_t>(launch.shared_bytes), seed,
                          [&] { skinny_gemm_kernel<decltype(format)::value>(args); });
    if (!failure.empty()) throw std::runtime_error(failure);
  });
}

}  // namespace

PYBIND11_MODULE(emulated_skinny, module) {
  module.def("cuda_skinny_layout", &emulate_layout);
  module.def("cuda_skinny_run", &emulate_run);
}
