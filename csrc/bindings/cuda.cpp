// The CUDA entry points of moe_optimizer.ops._kernels; moe_optimizer/ops/cuda_dispatch.py is the only caller.
#include "bindings/cuda.h"

#include <pybind11/stl.h>

#include "launch/cuda_kernels.h"

namespace py = pybind11;

namespace moeopt {

void bind_cuda(py::module_& module) {
  module.def(
      "cuda_decode",
      [](const Values& problem, const Values& workspace, const Values& geometry, uintptr_t stream, int start) {
        run_decode(problem, workspace, geometry, stream, static_cast<DecodeStart>(start));
      },
      py::arg("problem"), py::arg("workspace"), py::arg("geometry"), py::arg("stream"), py::arg("start"),
      py::call_guard<py::gil_scoped_release>(), "Small batches: router or top-k ids to combined output.");
  module.def("cuda_grouped", &run_grouped, py::arg("problem"), py::arg("workspace"), py::arg("geometry"),
             py::arg("stream"), py::call_guard<py::gil_scoped_release>(), "Larger batches: routing, GEMMs, combine.");
  module.def("cuda_decode_blocks_per_multiprocessor", &decode_blocks_per_multiprocessor, py::arg("problem"),
             py::arg("geometry"), "Resident blocks of the small-batch kernel, by CUDA's occupancy calculator.");
}

}  // namespace moeopt
