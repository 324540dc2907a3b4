// Starts the CUDA kernels.
//
// Every function enqueues on `stream` and returns; nothing is allocated, read back or waited for, so all of them can be
// captured in a CUDA graph. A launch that CUDA refuses throws std::runtime_error with the kernel's name and the reason.
#pragma once

#include "launch/problem.h"

namespace moeopt {

// Small batches: router (with logits), then two launches of which the second starts early.
void run_direct(Problem problem, const DirectWorkspace& workspace, const DirectLaunch& launch, uintptr_t stream);

// Router (with logits), routing, token preparation, both grouped GEMMs, combine.
void run_grouped(Problem problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch, uintptr_t stream);

}  // namespace moeopt
