// From what the router wrote to a local expert.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/fused_experts.h"

namespace moeopt {

MOEOPT_DEVICE int local_expert(const FusedExpertsArgs& moe, int64_t id) {
  if (moe.expert_map != nullptr) {
    if (id < 0 || id >= moe.num_global_experts) return -1;
    id = moe.expert_map[id];
  }
  // An id past the end cannot be reported from here; it is skipped like a negative one.
  return id >= 0 && id < moe.num_local_experts ? static_cast<int>(id) : -1;
}

// Local expert of pair = token * k + j, or -1: skipped. The ids may come from a launch that overlaps this one.
MOEOPT_DEVICE int expert_of_pair(const FusedExpertsArgs& moe, int64_t pair) {
  if (moe.ids_are_int64) {
    return local_expert(moe, load_shared_across_blocks(static_cast<const int64_t*>(moe.topk_ids) + pair));
  }
  return local_expert(moe, load_shared_across_blocks(static_cast<const int32_t*>(moe.topk_ids) + pair));
}

// The same of several pairs per thread, number i at pair first + i * step, -1 from num_pairs on; there is at least one.
// All ids are asked for before one is looked at: one after the other, each would wait for L2.
template <int kPairs>
MOEOPT_DEVICE void experts_of_pairs(const FusedExpertsArgs& moe, int first, int step, int num_pairs,
                                    int (&experts)[kPairs]) {
  int64_t ids[kPairs];
  const auto load = [&](const auto* source) {
    MOEOPT_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const int pair = first + i * step;
      ids[i] = load_shared_across_blocks(source + (pair < num_pairs ? pair : num_pairs - 1));
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
