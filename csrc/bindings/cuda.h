// Adds the CUDA entry points to the extension module; part of the build only where nvcc was found.
#pragma once

#include <pybind11/pybind11.h>

namespace moeopt {

void bind_cuda(pybind11::module_& module);

}  // namespace moeopt
