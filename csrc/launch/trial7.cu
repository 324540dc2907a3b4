#include "launch/grouped_gemm_sm90.cuh"

namespace moeopt {
void launch_trials_of_weights(const Problem& p, const GroupedWorkspace& w, const GroupedLaunch& l, cudaStream_t s) {
  constexpr GemmMode kMode = GemmMode::kMxfp4Weights;
  if (l.trial == 7) launch_trial<7, kMode, 16>(p, w, l, s);
  if (l.trial == 8) launch_trial<8, kMode, 16>(p, w, l, s);
  if (l.trial == 9) launch_trial<9, kMode, 16>(p, w, l, s);
  if (l.trial == 10) launch_trial<10, kMode, 16>(p, w, l, s);
  if (l.trial == 11) launch_trial<11, kMode, 16>(p, w, l, s);
}
}  // namespace moeopt
