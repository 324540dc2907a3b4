// Runs kernels without the GIL, and turns what they find wrong with a routing into a ValueError.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "moeopt/fused_experts.h"

namespace moeopt {

// Calls `kernel(&error)` without the GIL; throws ValueError if it finds a routing entry that names no expert.
template <typename Kernel>
void run_checked(Kernel kernel) {
  RoutingError error{};
  {
    pybind11::gil_scoped_release release;
    if (kernel(&error)) return;
  }
  throw pybind11::value_error((error.mapped ? "expert_map: returns local expert " : "topk_ids: got expert ") +
                              std::to_string(error.id) + " for token " + std::to_string(error.token) + ", slot " +
                              std::to_string(error.slot) + ", expected below " + std::to_string(error.limit) +
                              ", or negative to skip");
}

}  // namespace moeopt
