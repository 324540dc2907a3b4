// The gate product and top-k of csrc/include/moeopt/gate_topk.cuh as emulated_kernels.cpp has the others: with the CUDA
// functions `cuda_gate_layout` and `cuda_gate_run`. A module of its own compiles in a tenth of the time.
#include <pybind11/pybind11.h>

#include "bindings/from_python.h"
#include "emulated_device.h"
#include "launch/gate_topk.h"

using namespace moeopt;

namespace {

namespace py = pybind11;

py::dict emulate_layout(const py::dict& gate, const py::dict& router) {
  return to_python(
      gate_topk_launch(from_python<GateTopkArgs>("gate", gate), from_python<RouterArgs>("router", router)));
}

void emulate_run(const py::dict& gate, const py::dict& router, uint64_t seed) {
  const auto args = from_python<GateTopkArgs>("gate", gate);
  const auto rule = from_python<RouterArgs>("router", router);
  const GateTopkLaunch launch = gate_topk_launch(args, rule);
  const std::string failure = emulation::launch(launch.blocks, launch.threads, static_cast<size_t>(launch.shared_bytes),
                                                seed, [&] { gate_topk_kernel(args, rule); });
  if (!failure.empty()) throw std::runtime_error(failure);
}

}  // namespace

PYBIND11_MODULE(emulated_gate, module) {
  module.def("cuda_gate_layout", &emulate_layout);
  module.def("cuda_gate_run", &emulate_run);
}
