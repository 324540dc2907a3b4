// Starting the CUDA kernels: integer lists in (see problem.h and arguments.h), nothing of CUDA in the interface.
//
// Every function enqueues on `stream` and returns; nothing is allocated, read back or waited for, so all of them can be
// captured in a CUDA graph. A launch that CUDA refuses throws std::runtime_error with the kernel's name and the reason.
#pragma once

#include <cstdint>
#include <vector>

namespace moeopt {

using Values = std::vector<int64_t>;

// Small batches: router (with logits), then two launches of which the second starts early.
void run_direct(const Values& problem, const Values& workspace, const Values& geometry, uintptr_t stream);

// Router (with logits), routing, token preparation, both grouped GEMMs, combine.
void run_grouped(const Values& problem, const Values& workspace, const Values& geometry, uintptr_t stream);

}  // namespace moeopt
