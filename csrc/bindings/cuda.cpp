// The CUDA entry points of moe_optimizer.ops._kernels; moe_optimizer/ops/cuda_dispatch.py is the only caller.
#include "bindings/cuda.h"

#include <pybind11/stl.h>

#include "launch/cuda_kernels.h"

namespace py = pybind11;

namespace moeopt {

void bind_cuda(py::module_& module) {
  module.def("cuda_direct", &run_direct, py::arg("problem"), py::arg("workspace"), py::arg("geometry"),
             py::arg("stream"), py::call_guard<py::gil_scoped_release>(), "Small batches: two chained launches.");
  module.def("cuda_grouped", &run_grouped, py::arg("problem"), py::arg("workspace"), py::arg("geometry"),
             py::arg("stream"), py::call_guard<py::gil_scoped_release>(), "Larger batches: routing, GEMMs, combine.");
}

}  // namespace moeopt
