// The kernels of csrc/include/moeopt, run thread by thread on the CPU, behind a C interface for ctypes.
//
// Every function returns 0, or 1 with a message: a deadlock, a misaligned access, a barrier used wrongly.
#include <cmath>
#include <cstdio>

#include "emulated_device.h"
#include "launch/arguments.h"

using namespace moeopt;

namespace {

int report(const std::string& message, char* error, int capacity) {
  std::snprintf(error, static_cast<size_t>(capacity), "%s", message.c_str());
  return message.empty() ? 0 : 1;
}

template <int kWeightBytes>
std::string run_direct(const DirectArgs& args, const DirectLaunch& launch, uint64_t seed) {
  const std::string failure =
      emulation::launch(launch.up_grid, kDirectUpWarps * 32, static_cast<size_t>(launch.up_shared_bytes), seed,
                        [&] {
                          if constexpr (kWeightBytes == 2) {
                            if (launch.up_wide) return direct_up_kernel<kWeightBytes, kDirectWide>(args);
                          }
                          direct_up_kernel<kWeightBytes, kDirectNarrow>(args);
                        });
  if (!failure.empty()) return failure;
  return emulation::launch(launch.down_grid, kDirectDownWarps * 32, static_cast<size_t>(launch.down_shared_bytes), seed,
                           [&] {
                             if (launch.down_grid == args.moe.hidden_size / kDirectRows) {
                               direct_down_kernel<kWeightBytes, true>(args);
                             } else {
                               direct_down_kernel<kWeightBytes, false>(args);
                             }
                           });
}

TensorMap tensor_map(const WeightView& view) {
  TensorMap map{};
  map.base = view.base;
  map.element_bytes = view.element_bytes;
  for (int i = 0; i < 3; ++i) {
    map.sizes[i] = view.sizes[i];
    map.strides[i] = view.strides[i];
    map.box[i] = view.box[i];
  }
  return map;
}

// Both GEMMs at once: the down launch waits for h itself.
template <GemmMode kMode, int kTokens>
std::string run_gemms(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                      uint64_t seed) {
  const TensorMap gate = tensor_map(weight_view(problem.moe, 0)), up = tensor_map(weight_view(problem.moe, 1));
  const TensorMap down = tensor_map(weight_view(problem.moe, 2));
  const GemmArgs up_args = up_arguments(problem, workspace, launch);
  const GemmArgs down_args = down_arguments(problem, workspace, launch);
  emulation::Grid grid{launch.grid, kGemmThreads, static_cast<size_t>(launch.shared_bytes),
                       [&] { grouped_gemm_kernel<kMode, kTokens, true>(gate, up, up_args); }, 0, launch.cluster_blocks};
  std::vector<emulation::Grid> grids{grid, grid};
  grids[1].kernel = [&] { grouped_gemm_kernel<kMode, kTokens, false>(down, down, down_args); };
  return emulation::launch_together(grids, seed);
}

std::string run_gemms_for(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                          uint64_t seed) {
  const auto choose = [&](auto mode_constant) -> std::string {
    constexpr GemmMode kMode = decltype(mode_constant)::value;
    if constexpr (kMode != GemmMode::kFp8) {
      if (launch.tile_tokens == 16) return run_gemms<kMode, 16>(problem, workspace, launch, seed);
    }
    if (launch.tile_tokens == 32) return run_gemms<kMode, 32>(problem, workspace, launch, seed);
    if (launch.tile_tokens == 64) return run_gemms<kMode, 64>(problem, workspace, launch, seed);
    if constexpr (kMode != GemmMode::kFp8Weights) {
      if (launch.tile_tokens == 96) return run_gemms<kMode, 96>(problem, workspace, launch, seed);
    }
    if constexpr (kMode == GemmMode::kFp8) {
      if (launch.tile_tokens == 144) return run_gemms<kMode, 144>(problem, workspace, launch, seed);
    }
    if constexpr (kMode == GemmMode::kBf16) {
      if (launch.tile_tokens == 128) return run_gemms<kMode, 128>(problem, workspace, launch, seed);
      if (launch.tile_tokens == 160) return run_gemms<kMode, 160>(problem, workspace, launch, seed);
    }
    return "no such tile";
  };
  if (launch.mode == GemmMode::kBf16) return choose(std::integral_constant<GemmMode, GemmMode::kBf16>());
  if (launch.mode == GemmMode::kFp8) return choose(std::integral_constant<GemmMode, GemmMode::kFp8>());
  return choose(std::integral_constant<GemmMode, GemmMode::kFp8Weights>());
}

std::string run_routing(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                        uint64_t seed) {
  const RouteArgs args = route_arguments(problem, workspace, launch);
  const std::string failure =
      emulation::launch(launch.route_blocks + launch.prepare_blocks, kRouteThreads,
                        static_cast<size_t>(launch.route_shared_bytes), seed,
                        [&] { count_pairs_kernel(args, prepare_arguments(problem, workspace, launch.mode)); });
  if (!failure.empty() || launch.route_blocks == 1) return failure;
  return emulation::launch(launch.route_blocks, kRouteThreads, 0, seed, [&] { place_pairs_kernel(args); });
}

std::string run_router(const Problem& problem, int* ids, float* weights, uint64_t seed) {
  const FusedExpertsArgs& moe = problem.moe;
  const int columns = static_cast<int>(router_columns(moe)), tokens = static_cast<int>(moe.num_tokens);
  const auto shared = static_cast<size_t>(router_shared_bytes(moe));
  return emulation::launch((tokens + kRouterWarps - 1) / kRouterWarps, kRouterWarps * 32, shared, seed, [&] {
    route_tokens_kernel(problem.router, tokens, columns, static_cast<int>(moe.top_k), ids, weights);
  });
}

}  // namespace

extern "C" {

int emulate_direct(const int64_t* values, int64_t num_values, const int64_t* workspace_values, int64_t num_workspace,
                   const int64_t* geometry, int64_t num_geometry, uint64_t seed, char* error, int capacity) {
  Problem problem = problem_from_values(values, num_values);
  const DirectLaunch launch = direct_launch(geometry, num_geometry);
  const DirectWorkspace workspace = direct_workspace(workspace_values, num_workspace);
  if (problem.router.logits != nullptr) {
    const std::string failure = run_router(problem, workspace.topk_ids, workspace.topk_weights, seed);
    if (!failure.empty()) return report(failure, error, capacity);
    problem = with_routed_ids(problem, workspace.topk_ids, workspace.topk_weights);
  }
  const bool fp8 = problem.moe.weight_dtype == DType::kFloat8E4M3;
  const DirectArgs args = {problem.moe, workspace.h};
  return report((fp8 ? run_direct<1> : run_direct<2>)(args, launch, seed), error, capacity);
}

// routing_only: stop before the first GEMM.
int emulate_grouped(const int64_t* values, int64_t num_values, const int64_t* workspace_values, int64_t num_workspace,
                    const int64_t* geometry, int64_t num_geometry, int routing_only, uint64_t seed, char* error,
                    int capacity) {
  Problem problem = problem_from_values(values, num_values);
  const GroupedLaunch launch = grouped_launch(geometry, num_geometry);
  const GroupedWorkspace workspace = grouped_workspace(workspace_values, num_workspace);
  const FusedExpertsArgs& moe = problem.moe;
  std::string failure;
  if (problem.router.logits != nullptr) {
    failure = run_router(problem, workspace.topk_ids, workspace.topk_weights, seed);
    problem = with_routed_ids(problem, workspace.topk_ids, workspace.topk_weights);
  }
  if (failure.empty()) failure = run_routing(problem, workspace, launch, seed);
  if (routing_only || !failure.empty()) return report(failure, error, capacity);
  failure = run_gemms_for(problem, workspace, launch, seed);
  const CombineArgs combine = combine_arguments(problem, workspace);
  const int column_blocks = static_cast<int>((moe.hidden_size + 8 * kCombineThreads - 1) / (8 * kCombineThreads));
  for (int y = 0; y < column_blocks && failure.empty(); ++y) {
    failure = emulation::launch(
        static_cast<int>(moe.num_tokens), kCombineThreads, 0, seed, [&] { combine_kernel(combine); }, y);
  }
  return report(failure, error, capacity);
}

// The compiled numbers that moe_optimizer/ops/launch_geometry repeats; -1: no such name.
int64_t compiled_constant(const char* name) {
  const struct {
    const char* name;
    int64_t value;
  } constants[] = {
      {"direct.up_blocks_1", kDirectUpBlocks<1, kDirectNarrow>},
      {"direct.up_blocks_2", kDirectUpBlocks<2, kDirectNarrow>},
      {"direct.WIDE_UP_BLOCKS", kDirectUpBlocks<2, kDirectWide>},
      {"direct.TOKENS", kDirectTokens},
      {"direct.PAIRS", kDirectPairs},
      {"direct.UP_WARPS", kDirectUpWarps},
      {"direct.DOWN_WARPS", kDirectDownWarps},
      {"direct.ROWS", kDirectRows},
      {"direct.up_rows_1", kDirectUpRows<1>},
      {"direct.up_rows_2", kDirectUpRows<2>},
      {"direct.ROUTING_BYTES", kDirectScratchOffset},
      {"direct.SCRATCH_PER_EXPERT", kDirectScratchPerExpert},
      {"direct.UP_SUM_BYTES", kDirectUpSumBytes},
      {"direct.DOWN_SUM_BYTES_PER_TOKEN", kDirectDownSumBytesPerToken},
      {"grouped.THREADS", kGemmThreads},
      {"grouped.PRODUCER_THREADS", kProducerThreads},
      {"grouped.PRODUCER_REGISTERS", kProducerRegisters},
      {"grouped.MATH_REGISTERS", kMathRegisters},
      {"grouped.BOX_ROWS", kBoxRows},
      {"grouped.stage_bytes_0_16", GemmShape<GemmMode::kBf16, 16>::kStageBytes},
      {"grouped.stage_bytes_0_128", GemmShape<GemmMode::kBf16, 128>::kStageBytes},
      {"grouped.stage_bytes_0_160", GemmShape<GemmMode::kBf16, 160>::kStageBytes},
      {"grouped.stage_bytes_1_64", GemmShape<GemmMode::kFp8Weights, 64>::kStageBytes},
      {"grouped.stage_bytes_2_96", GemmShape<GemmMode::kFp8, 96>::kStageBytes},
      {"grouped.stage_bytes_2_144", GemmShape<GemmMode::kFp8, 144>::kStageBytes},
      {"grouped.staging_bytes_0_160", GemmShape<GemmMode::kBf16, 160>::kStagingBytes},
      {"grouped.staging_bytes_2_32", GemmShape<GemmMode::kFp8, 32>::kStagingBytes},
      {"grouped.tile_entry_bytes", sizeof(TokenTile)},
      {"grouped.TASK_PLACES", kTaskPlaces},
      {"grouped.TASK_QUEUE_BYTES", kTaskQueueBytes},
      {"routing.THREADS", kRouteThreads},
      {"routing.PAIRS_PER_BLOCK", kRoutePairs},
      {"routing.WARPS", kRouteWarps},
      {"routing.FIXED_SHARED_BYTES", sizeof(RouteShared)},
  };
  for (const auto& constant : constants) {
    if (std::strcmp(constant.name, name) == 0) return constant.value;
  }
  return -1;
}

int emulate_router(const int64_t* values, int64_t num_values, int* ids, float* weights, uint64_t seed, char* error,
                   int capacity) {
  return report(run_router(problem_from_values(values, num_values), ids, weights, seed), error, capacity);
}

}  // extern "C"
