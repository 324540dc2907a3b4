#include "launch/grouped_gemm_sm90.cuh"

namespace moeopt {
void launch_trial2(const Problem& p, const GroupedWorkspace& w, const GroupedLaunch& l, cudaStream_t s) {
  launch_trial<2>(p, w, l, s);
}
}  // namespace moeopt
