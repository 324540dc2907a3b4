// The gate as a launch of its own, first of every path that starts from logits.
#pragma once

#include <cuda_runtime.h>

#include "launch/problem.h"

namespace moeopt {

// Writes ids and weights, [T, k] each.
void launch_router(const Problem& problem, int* topk_ids, float* topk_weights, cudaStream_t stream);

}  // namespace moeopt
