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

}  // namespace moeopt
