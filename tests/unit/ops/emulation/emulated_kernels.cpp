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

template <int kWeightBytes, int kColumnBlocks>
std::string run_decode(const DecodeArgs& args, DecodePhase phase, const DecodeLaunch& launch, uint64_t seed) {
  return emulation::launch(launch.grid, kDecodeThreads, static_cast<size_t>(launch.shared_bytes), seed, [&] {
    if (phase == DecodePhase::kBoth) flash_dmoe_decode_kernel<kWeightBytes, kColumnBlocks, DecodePhase::kBoth>(args);
    if (phase == DecodePhase::kUp) flash_dmoe_decode_kernel<kWeightBytes, kColumnBlocks, DecodePhase::kUp>(args);
    if (phase == DecodePhase::kDown) flash_dmoe_decode_kernel<kWeightBytes, kColumnBlocks, DecodePhase::kDown>(args);
  });
}

template <int kWeightBytes>
std::string run_direct(const DirectArgs& args, const DecodeLaunch& launch, uint64_t seed) {
  const auto shared = static_cast<size_t>(launch.shared_bytes);
  const std::string failure = emulation::launch(launch.grid, kDirectUpWarps * 32, shared, seed,
                                                [&] { direct_up_kernel<kWeightBytes>(args); });
  if (!failure.empty()) return failure;
  return emulation::launch(static_cast<int>(args.moe.hidden_size / 16), kDirectDownWarps * 32, shared, seed,
                           [&] { direct_down_kernel<kWeightBytes>(args); });
}

TensorMap tensor_map(const WeightView& view) {
  TensorMap map{};
  map.rank = view.rank;
  map.base = view.base;
  map.element_bytes = view.element_bytes;
  for (int i = 0; i < 5; ++i) {
    map.sizes[i] = view.sizes[i];
    map.strides[i] = view.strides[i];
    map.box[i] = view.box[i];
  }
  return map;
}

template <GemmMode kMode, int kTokens, bool kUp>
std::string run_gemm(const Problem& problem, const GemmArgs& args, const GroupedLaunch& launch, uint64_t seed) {
  constexpr bool kWide = GemmShape<kMode, kTokens>::kWide;
  const FusedExpertsArgs& moe = problem.moe;
  const TensorMap map0 = tensor_map(kWide ? grouped_weight_view(moe, kUp) : weight_view(moe, kUp ? 0 : 2));
  const TensorMap map1 = kWide ? map0 : tensor_map(weight_view(moe, kUp ? 1 : 2));
  return emulation::launch(launch.grid, kGemmThreads, static_cast<size_t>(launch.shared_bytes), seed,
                           [&] { grouped_gemm_kernel<kMode, kTokens, kUp>(map0, map1, args); });
}

template <bool kUp>
std::string run_gemm_for(const Problem& problem, const GemmArgs& args, const GroupedLaunch& launch, uint64_t seed) {
  const auto choose = [&](auto mode_constant) -> std::string {
    constexpr GemmMode kMode = decltype(mode_constant)::value;
    if (launch.tile_tokens == 16) return run_gemm<kMode, 16, kUp>(problem, args, launch, seed);
    if (launch.tile_tokens == 32) return run_gemm<kMode, 32, kUp>(problem, args, launch, seed);
    if (launch.tile_tokens == 64) return run_gemm<kMode, 64, kUp>(problem, args, launch, seed);
    if (launch.tile_tokens == 128) return run_gemm<kMode, 128, kUp>(problem, args, launch, seed);
    if constexpr (kMode == GemmMode::kBf16) {
      if (launch.tile_tokens == 256) return run_gemm<kMode, 256, kUp>(problem, args, launch, seed);
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
      emulation::launch(launch.route_blocks, kRouteThreads, static_cast<size_t>(launch.route_shared_bytes), seed,
                        [&] { count_pairs_kernel(args); });
  if (!failure.empty() || launch.route_blocks == 1) return failure;
  return emulation::launch(launch.route_blocks, kRouteThreads, 0, seed, [&] { place_pairs_kernel(args); });
}

std::string run_prepare(const PrepareArgs& args, uint64_t seed) {
  return emulation::launch(2, kPrepareThreads, 0, seed, [&] { prepare_tokens_kernel(args); });
}

std::string run_router(const Problem& problem, int* ids, float* weights, uint64_t seed) {
  const FusedExpertsArgs& moe = problem.moe;
  const int columns = static_cast<int>(router_columns(moe)), tokens = static_cast<int>(moe.num_tokens);
  return emulation::launch((tokens + 3) / 4, 128, static_cast<size_t>(4 * 8 * columns), seed, [&] {
    route_tokens_kernel(problem.router, tokens, columns, static_cast<int>(moe.top_k), ids, weights);
  });
}

}  // namespace

extern "C" {

// split: two launches (up, down) instead of one.
int emulate_decode(const int64_t* values, int64_t num_values, const int64_t* workspace, int64_t num_workspace,
                   const int64_t* geometry, int64_t num_geometry, int split, uint64_t seed, char* error,
                   int capacity) {
  const Problem problem = problem_from_values(values, num_values);
  const DecodeLaunch launch = decode_launch(geometry, num_geometry);
  if (launch.is_direct) {
    const bool fp8 = problem.moe.weight_dtype == DType::kFloat8E4M3;
    const DirectArgs args = direct_arguments(problem, workspace, num_workspace);
    return report((fp8 ? run_direct<1> : run_direct<2>)(args, launch, seed), error, capacity);
  }
  const DecodeArgs args = decode_arguments(problem, workspace, num_workspace, launch);
  const auto run = [&](DecodePhase phase) {
    const bool fp8 = problem.moe.weight_dtype == DType::kFloat8E4M3;
    const auto entry = fp8 ? (launch.column_blocks == 1 ? run_decode<1, 1> : run_decode<1, 2>)
                           : (launch.column_blocks == 1 ? run_decode<2, 1> : run_decode<2, 2>);
    return entry(args, phase, launch, seed);
  };
  if (!split) return report(run(DecodePhase::kBoth), error, capacity);
  const std::string first = run(DecodePhase::kUp);
  return report(first.empty() ? run(DecodePhase::kDown) : first, error, capacity);
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
    problem = with_routed_ids(problem, workspace);
  }
  if (failure.empty()) failure = run_routing(problem, workspace, launch, seed);
  if (routing_only || !failure.empty()) return report(failure, error, capacity);
  if (launch.mode != GemmMode::kBf16) failure = run_prepare(prepare_x(problem, workspace, launch.mode), seed);
  if (failure.empty()) {
    failure = run_gemm_for<true>(problem, up_arguments(problem, workspace, launch), launch, seed);
  }
  if (failure.empty() && launch.mode == GemmMode::kFp8) failure = run_prepare(prepare_h(problem, workspace), seed);
  if (failure.empty()) {
    failure = run_gemm_for<false>(problem, down_arguments(problem, workspace, launch), launch, seed);
  }
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
      {"decode.THREADS", kDecodeThreads},
      {"decode.MATH_WARPS", kDecodeMathWarps},
      {"decode.PRODUCER_WARPS", kDecodeProducerWarps},
      {"decode.TILE_ROWS", kTileRows},
      {"decode.STEP_BYTES", kStepBytes},
      {"decode.STEPS_PER_WARP", kStepsPerWarp},
      {"decode.CHUNK_BYTES", kChunkBytes},
      {"decode.ROW_PITCH", kRowPitch},
      {"decode.STAGE_BYTES", kStageBytes},
      {"decode.MAX_PAIRS", kMaxPairs},
      {"decode.ROUTING_BYTES", sizeof(DecodeRouting)},
      {"decode.direct_up_blocks_1", kDirectUpBlocks<1>},
      {"decode.direct_up_blocks_2", kDirectUpBlocks<2>},
      {"decode.DIRECT_PAIRS", kDirectPairs},
      {"decode.DIRECT_UP_WARPS", kDirectUpWarps},
      {"decode.DIRECT_DOWN_WARPS", kDirectDownWarps},
      {"decode.DIRECT_ROUTING_BYTES", kDirectScratchOffset},
      {"decode.DIRECT_SUM_BYTES", kDirectSumBytes},
      {"decode.DIRECT_TOKENS", kDirectTokens},
      {"decode.reduction_bytes_1", kReductionBytes<1>},
      {"decode.reduction_bytes_2", kReductionBytes<2>},
      {"grouped.THREADS", kGemmThreads},
      {"grouped.PRODUCER_THREADS", kProducerThreads},
      {"grouped.PRODUCER_REGISTERS", GemmShape<GemmMode::kBf16, 128>::kProducerRegisters},
      {"grouped.MATH_REGISTERS", GemmShape<GemmMode::kBf16, 128>::kMathRegisters},
      {"grouped.WIDE_PRODUCER_REGISTERS", GemmShape<GemmMode::kBf16, 256>::kProducerRegisters},
      {"grouped.WIDE_MATH_REGISTERS", GemmShape<GemmMode::kBf16, 256>::kMathRegisters},
      {"grouped.BOX_ROWS", kBoxRows},
      {"grouped.LAG", kLag},
      {"grouped.stage_bytes_0_16", GemmShape<GemmMode::kBf16, 16>::kStageBytes},
      {"grouped.stage_bytes_0_128", GemmShape<GemmMode::kBf16, 128>::kStageBytes},
      {"grouped.stage_bytes_0_256", GemmShape<GemmMode::kBf16, 256>::kStageBytes},
      {"grouped.stage_bytes_1_64", GemmShape<GemmMode::kFp8Weights, 64>::kStageBytes},
      {"grouped.stage_bytes_2_128", GemmShape<GemmMode::kFp8, 128>::kStageBytes},
      {"grouped.staging_bytes_64", GemmShape<GemmMode::kBf16, 64>::kStagingBytes},
      {"grouped.tile_entry_bytes", sizeof(TokenTile)},
      {"routing.THREADS", kRouteThreads},
      {"routing.PAIRS_PER_BLOCK", kRoutePairs},
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
