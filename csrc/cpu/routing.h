// Token-to-expert routing, turned into the order in which the kernels work.
#pragma once

#include <cstdint>
#include <vector>

#include "expert_kernels.h"
#include "moeopt/fused_experts.h"

namespace moeopt {

// Runs [run_begin, run_end) whose intermediate is computed, kept in cache and consumed together.
struct Group {
  int64_t run_begin, run_end;
  int64_t pair_begin;  // first pair of the group: row 0 of its intermediate
};

struct Routing {
  std::vector<Pair> pairs;  // by expert, then token, then slot: the order of the final sum
  std::vector<ExpertRun> runs;
  std::vector<Group> groups;  // at least one, possibly without runs: the output must be written anyway
  int64_t max_group_pairs = 0;
};

// Sorts the routing of `args`; no group has more than `max_pairs` pairs.
//
//   ids [T, k]:  t0: 5 2   t1: 2 -1   t2: 5 2
//   pairs:       (t0 t1 t2 of expert 2) (t0 t2 of expert 5)
//   runs:        [0, 3) -> 2            [3, 5) -> 5
//
// Returns false with *error filled if an id names no expert.
bool sort_routing(const FusedExpertsArgs& args, int64_t max_pairs, Routing* routing, RoutingError* error);

}  // namespace moeopt
