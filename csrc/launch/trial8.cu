#include "launch/grouped_gemm_sm90.cuh"

namespace moeopt {
void launch_ahead_mxfp4(const Problem& p, const GroupedWorkspace& w, const GroupedLaunch& l, cudaStream_t s) {
  constexpr GemmMode kMode = GemmMode::kMxfp4Weights;
  if (l.tile_tokens == 16) launch_trial<12, kMode, 16>(p, w, l, s);
  if (l.tile_tokens == 32) launch_trial<12, kMode, 32>(p, w, l, s);
  if (l.tile_tokens == 64) launch_trial<12, kMode, 64>(p, w, l, s);
}
}  // namespace moeopt
