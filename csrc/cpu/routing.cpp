#include "routing.h"

#include <algorithm>

namespace moeopt {
namespace {

constexpr int64_t kSkipped = -1;

// Local expert of entry `index`, kSkipped, or an error.
template <typename Id>
bool local_expert(const FusedExpertsArgs& args, int64_t index, int64_t* local, RoutingError* error) {
  const int64_t id = static_cast<const Id*>(args.topk_ids)[index];
  const int64_t limit = args.expert_map ? args.num_global_experts : args.num_local_experts;
  *error = {index / args.top_k, index % args.top_k, id, limit, false};
  if (id >= limit) return false;
  *local = id < 0 ? kSkipped : id;
  if (id >= 0 && args.expert_map) {
    *local = args.expert_map[id];
    if (*local >= args.num_local_experts) {
      *error = {error->token, error->slot, *local, args.num_local_experts, true};
      return false;
    }
    if (*local < 0) *local = kSkipped;
  }
  return true;
}

template <typename Id>
bool sort_pairs(const FusedExpertsArgs& args, Routing* routing, std::vector<int64_t>* offsets, RoutingError* error) {
  const int64_t entries = args.num_tokens * args.top_k;
  std::vector<int32_t> experts(entries);
  offsets->assign(args.num_local_experts + 1, 0);
  for (int64_t i = 0; i < entries; ++i) {
    int64_t local;
    if (!local_expert<Id>(args, i, &local, error)) return false;
    experts[i] = static_cast<int32_t>(local);
    if (local >= 0) ++(*offsets)[local + 1];
  }
  for (int64_t e = 0; e < args.num_local_experts; ++e) (*offsets)[e + 1] += (*offsets)[e];

  routing->pairs.resize(offsets->back());
  std::vector<int64_t> next(offsets->begin(), offsets->end() - 1);
  for (int64_t i = 0; i < entries; ++i) {
    if (experts[i] < 0) continue;
    routing->pairs[next[experts[i]]++] = {static_cast<int32_t>(i / args.top_k), args.topk_weights[i]};
  }
  return true;
}

}  // namespace

bool sort_routing(const FusedExpertsArgs& args, int64_t max_pairs, Routing* routing, RoutingError* error) {
  std::vector<int64_t> offsets;
  const bool valid = args.ids_are_int64 ? sort_pairs<int64_t>(args, routing, &offsets, error)
                                        : sort_pairs<int32_t>(args, routing, &offsets, error);
  if (!valid) return false;

  routing->runs.clear();
  for (int64_t e = 0; e < args.num_local_experts; ++e) {
    for (int64_t begin = offsets[e]; begin < offsets[e + 1]; begin += max_pairs) {
      routing->runs.push_back({e, begin, std::min(begin + max_pairs, offsets[e + 1])});
    }
  }

  routing->groups.assign(1, {0, 0, 0});
  routing->max_group_pairs = 0;
  for (int64_t r = 0; r < static_cast<int64_t>(routing->runs.size()); ++r) {
    const ExpertRun& run = routing->runs[r];
    if (run.end - routing->groups.back().pair_begin > max_pairs) routing->groups.push_back({r, r, run.begin});
    Group& group = routing->groups.back();
    group.run_end = r + 1;
    routing->max_group_pairs = std::max(routing->max_group_pairs, run.end - group.pair_begin);
  }
  return true;
}

}  // namespace moeopt
