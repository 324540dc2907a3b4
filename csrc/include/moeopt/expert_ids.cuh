// From expert ids, as the router wrote them, to local experts.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/fused_experts.h"

namespace moeopt {

MOEOPT_DEVICE int local_expert(const FusedExpertsArgs& moe, int64_t id) {
  if (moe.expert_map != nullptr) {
    if (id < 0 || id >= moe.num_global_experts) return -1;
    id = moe.expert_map[id];
  }
  // A kernel cannot report an id past the end; it skips it like a negative one.
  return id >= 0 && id < moe.num_local_experts ? static_cast<int>(id) : -1;
}

// Local expert of pair = token * k + j, or -1: skipped. The ids may come from a launch that overlaps this one.
MOEOPT_DEVICE int expert_of_pair(const FusedExpertsArgs& moe, int64_t pair) {
  if (moe.ids_are_int64) {
    return local_expert(moe, ld_global_cg(static_cast<const int64_t*>(moe.topk_ids) + pair));
  }
  return local_expert(moe, ld_global_cg(static_cast<const int32_t*>(moe.topk_ids) + pair));
}

// The same for several pairs per thread: entry i is that of pair first + i * step, -1 from num_pairs on. There is at
// least one pair. Loads all ids before using one, so that their L2 latencies overlap.
template <int kPairs>
MOEOPT_DEVICE void experts_of_pairs(const FusedExpertsArgs& moe, int first, int step, int num_pairs,
                                    int (&experts)[kPairs]) {
  int64_t ids[kPairs];
  const auto load = [&](const auto* source) {
    MOEOPT_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const int pair = first + i * step;
      ids[i] = ld_global_cg(source + (pair < num_pairs ? pair : num_pairs - 1));
    }
  };
  if (moe.ids_are_int64) {
    load(static_cast<const int64_t*>(moe.topk_ids));
  } else {
    load(static_cast<const int32_t*>(moe.topk_ids));
  }
  MOEOPT_UNROLL
  for (int i = 0; i < kPairs; ++i) experts[i] = first + i * step < num_pairs ? local_expert(moe, ids[i]) : -1;
}

}  // namespace moeopt
