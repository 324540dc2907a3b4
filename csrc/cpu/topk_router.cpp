// The gate: scores, choice, weights; one token after the other, tokens shared among the threads.
//
//   logits [E] -> softmax or sigmoid -> scores [E] --------------------------- gather -> weights [k]
//                                          | + bias                               ^
//                                          v                                      |
//                                       choice [E] -> best groups only -> k largest -> ids [k]
#include "moeopt/router.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "number_formats.h"
#include "team.h"

namespace moeopt {
namespace {

constexpr float kTiny = 1e-20f;             // keeps a token whose scores are all zero from dividing by zero
constexpr int64_t kProductsOfAScore = 256;  // that take as long as a score, its exponential and the search

float to_float_at(const void* logits, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBFloat16: return to_float(static_cast<const BFloat16*>(logits)[index]);
    case DType::kFloat16: return to_float(static_cast<const Float16*>(logits)[index]);
    default: return static_cast<const float*>(logits)[index];
  }
}

void score(const RouterArgs& router, const TopkRouterArgs& args, int64_t token, float* scores) {
  const int64_t row = token * args.logits_stride;
  for (int64_t e = 0; e < args.num_experts; ++e) {
    scores[e] = to_float_at(router.logits, args.logits_dtype, row + e);
  }
  if (router.scoring == Scoring::kSigmoid) {
    for (int64_t e = 0; e < args.num_experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
    return;
  }
  const float largest = *std::max_element(scores, scores + args.num_experts);
  float sum = 0.0f;
  for (int64_t e = 0; e < args.num_experts; ++e) {
    scores[e] = std::exp(scores[e] - largest);
    sum += scores[e];
  }
  for (int64_t e = 0; e < args.num_experts; ++e) scores[e] /= sum;
}

// A thread's memory.
struct Scratch {
  std::vector<float> scores, choice, groups;
  std::vector<char> open, open_groups;  // not yet taken, not excluded

  Scratch(const RouterArgs& router, const TopkRouterArgs& args)
      : scores(args.num_experts), choice(args.num_experts), groups(router.num_groups), open(args.num_experts),
        open_groups(router.num_groups) {}
};

// NaN counts as the largest value, as torch sorts it: a broken logit then shows in the output.
bool better(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// The first of the best open entries in [begin, end); -1 if none is open.
int64_t best_open(const std::vector<float>& values, const std::vector<char>& open, int64_t begin, int64_t end) {
  int64_t best = -1;
  for (int64_t i = begin; i < end; ++i) {
    if (open[i] && (best < 0 || better(values[i], values[best]))) best = i;
  }
  return best;
}

// Closes all experts but those of the best groups. A group counts by its best expert, or with a bias by the sum
// of its two best.
void keep_best_groups(const RouterArgs& router, const TopkRouterArgs& args, Scratch* scratch) {
  const int64_t size = args.num_experts / router.num_groups;
  for (int64_t g = 0; g < router.num_groups; ++g) {
    const int64_t best = best_open(scratch->choice, scratch->open, g * size, (g + 1) * size);
    scratch->groups[g] = scratch->choice[best];
    if (router.bias && size > 1) {
      scratch->open[best] = 0;
      scratch->groups[g] += scratch->choice[best_open(scratch->choice, scratch->open, g * size, (g + 1) * size)];
      scratch->open[best] = 1;
    }
  }
  std::fill(scratch->open_groups.begin(), scratch->open_groups.end(), 1);
  for (int64_t kept = 0; kept < router.topk_groups; ++kept) {
    scratch->open_groups[best_open(scratch->groups, scratch->open_groups, 0, router.num_groups)] = 0;
  }
  for (int64_t e = 0; e < args.num_experts; ++e) scratch->open[e] = !scratch->open_groups[e / size];
}

void route(const RouterArgs& router, const TopkRouterArgs& args, int64_t token, Scratch* scratch) {
  score(router, args, token, scratch->scores.data());
  std::fill(scratch->open.begin(), scratch->open.end(), 1);
  for (int64_t e = 0; e < args.num_experts; ++e) {
    scratch->choice[e] = scratch->scores[e] + (router.bias ? router.bias[e] : 0.0f);
  }
  if (router.num_groups > 1) keep_best_groups(router, args, scratch);

  float* weights = args.topk_weights + token * args.top_k;
  int32_t* ids = args.topk_ids + token * args.top_k;
  float sum = 0.0f;
  for (int64_t j = 0; j < args.top_k; ++j) {
    const int64_t best = best_open(scratch->choice, scratch->open, 0, args.num_experts);
    scratch->open[best] = 0;
    ids[j] = static_cast<int32_t>(best);
    weights[j] = scratch->scores[best];
    sum += scratch->scores[best];
  }
  const float divisor = router.renormalize ? sum + kTiny : 1.0f;
  for (int64_t j = 0; j < args.top_k; ++j) weights[j] = weights[j] / divisor * router.scaling_factor;
}

}  // namespace

void topk_router_cpu(const RouterArgs& router, const TopkRouterArgs& args) {
  const int threads = threads_for(args.num_tokens * args.num_experts * kProductsOfAScore);
  std::vector<Scratch> scratch(threads, Scratch(router, args));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < args.num_tokens; ++t) route(router, args, t, &scratch[omp_get_thread_num()]);
}

}  // namespace moeopt
