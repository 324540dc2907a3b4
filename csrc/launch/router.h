// Starts the gate: the first launch of every call that starts from logits.
#pragma once

#include <cuda_runtime.h>

#include "launch/problem.h"

namespace moeopt {

// Returns the problem with the ids and weights, [T, k] each, that this launch writes.
Problem launch_router(const Problem& problem, int* topk_ids, float* topk_weights, cudaStream_t stream);

}  // namespace moeopt
