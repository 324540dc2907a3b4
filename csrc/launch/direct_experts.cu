// Starts the direct path: router, direct_up_kernel, direct_down_kernel.
#include "launch/launch.cuh"

namespace moeopt {
namespace {

template <bool kInt4, int kBits, int kPieces>
void launch_direct(const DirectArgsOf<kInt4>& args, const DirectLaunch& launch, cudaStream_t stream) {
  LaunchShape shape{dim3(static_cast<unsigned>(launch.up_grid)), kDirectUpWarps * 32, launch.up_shared_bytes, stream};
  launch_kernel("direct_up", direct_up_kernel<kBits, kPieces, kInt4>, shape, args);
  shape.grid = dim3(static_cast<unsigned>(launch.down_grid));
  shape.threads = kDirectDownWarps * 32;
  shape.shared_bytes = launch.down_shared_bytes;
  const bool once = launch.down_grid == args.moe.hidden_size / kDirectRows;
  launch_kernel("direct_down", once ? direct_down_kernel<kBits, true, kInt4> : direct_down_kernel<kBits, false, kInt4>,
                shape, args);
}

}  // namespace

void run_experts(Problem problem, const DirectWorkspace& workspace, const DirectLaunch& launch, cudaStream_t stream) {
  if (problem.router.logits != nullptr) {
    problem = launch_router(problem, workspace.topk_ids, workspace.topk_weights, stream);
  }
  const DirectArgs args = {problem.moe, workspace.h};
  if (is_int4(problem)) {
    const DirectInt4Args int4_args{problem.moe, workspace.h, w13_factors(problem.int4), w2_factors(problem.int4)};
    return launch_direct<true, 4, kDirectNarrow>(int4_args, launch, stream);
  }
  const int bits = weight_bits(problem.moe);
  if (bits == 4) return launch_direct<false, 4, kDirectNarrow>(args, launch, stream);
  if (bits == 8) return launch_direct<false, 8, kDirectNarrow>(args, launch, stream);
  if (launch.up_wide) return launch_direct<false, 16, kDirectWide>(args, launch, stream);
  launch_direct<false, 16, kDirectNarrow>(args, launch, stream);
}

}  // namespace moeopt
