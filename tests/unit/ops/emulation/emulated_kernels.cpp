// The kernels of csrc/include/moeopt, run thread by thread on the CPU, as a Python module with the CUDA functions of
// csrc/bindings/module.cpp: `cuda_direct`, `cuda_grouped`. A seed takes the place of the stream.
//
// A deadlock, a misaligned access or a barrier used wrongly is a RuntimeError.
#include <pybind11/stl.h>
#include <cmath>

#include <map>

#include "bindings/from_python.h"
#include "emulated_device.h"
#include "launch/arguments.h"

using namespace moeopt;

namespace {

namespace py = pybind11;

void check(const std::string& failure) {
  if (!failure.empty()) throw std::runtime_error(failure);
}

template <int kWeightBytes>
void run_direct(const DirectArgs& args, const DirectLaunch& launch, uint64_t seed) {
  check(emulation::launch(launch.up_grid, kDirectUpWarps * 32, static_cast<size_t>(launch.up_shared_bytes), seed, [&] {
    if constexpr (kWeightBytes == 2) {
      if (launch.up_wide) return direct_up_kernel<kWeightBytes, kDirectWide>(args);
    }
    direct_up_kernel<kWeightBytes, kDirectNarrow>(args);
  }));
  check(emulation::launch(launch.down_grid, kDirectDownWarps * 32, static_cast<size_t>(launch.down_shared_bytes), seed,
                          [&] {
                            if (launch.down_grid == args.moe.hidden_size / kDirectRows) {
                              direct_down_kernel<kWeightBytes, true>(args);
                            } else {
                              direct_down_kernel<kWeightBytes, false>(args);
                            }
                          }));
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
template <GemmMode kMode>
void run_gemms(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch, uint64_t seed) {
  const TensorMap gate = tensor_map(weight_view(problem.moe, 0)), up = tensor_map(weight_view(problem.moe, 1));
  const TensorMap down = tensor_map(weight_view(problem.moe, 2));
  const GemmArgs up_args = up_arguments(problem, workspace, launch);
  const GemmArgs down_args = down_arguments(problem, workspace, launch);
  with_tile(CompiledTiles<kMode>(), launch, [&](auto tile) {
    constexpr int kTokens = decltype(tile)::value;
    emulation::Grid grid{launch.grid,
                         kGemmThreads,
                         static_cast<size_t>(launch.shared_bytes),
                         [&] { grouped_gemm_kernel<kMode, kTokens, true>(gate, up, up_args); },
                         0,
                         launch.cluster_blocks};
    std::vector<emulation::Grid> grids{grid, grid};
    grids[1].kernel = [&] { grouped_gemm_kernel<kMode, kTokens, false>(down, down, down_args); };
    check(emulation::launch_together(grids, seed));
  });
}

void run_routing(const Problem& problem, const GroupedWorkspace& workspace, const GroupedLaunch& launch,
                 uint64_t seed) {
  const RouteArgs args = route_arguments(problem, workspace, launch);
  check(emulation::launch(launch.route_blocks + launch.prepare_blocks, kRouteThreads,
                          static_cast<size_t>(launch.route_shared_bytes), seed,
                          [&] { count_pairs_kernel(args, prepare_arguments(problem, workspace, launch.mode)); }));
  if (launch.route_blocks == 1) return;
  check(emulation::launch(launch.route_blocks, kRouteThreads, 0, seed, [&] { place_pairs_kernel(args); }));
}

Problem run_router(const Problem& problem, int* ids, float* weights, uint64_t seed) {
  if (problem.router.logits == nullptr) return problem;
  const FusedExpertsArgs& moe = problem.moe;
  const int columns = static_cast<int>(router_columns(moe)), tokens = static_cast<int>(moe.num_tokens);
  const auto shared = static_cast<size_t>(router_shared_bytes(moe));
  check(emulation::launch((tokens + kRouterWarps - 1) / kRouterWarps, kRouterWarps * 32, shared, seed, [&] {
    route_tokens_kernel(problem.router, tokens, columns, static_cast<int>(moe.top_k), ids, weights);
  }));
  return with_routed_ids(problem, ids, weights);
}

void emulate_direct(const py::dict& experts, const py::object& router, const py::dict& workspace_fields,
                    const py::dict& launch_fields, uint64_t seed) {
  const auto workspace = from_python<DirectWorkspace>("workspace", workspace_fields);
  const auto launch = from_python<DirectLaunch>("launch", launch_fields);
  const Problem problem =
      run_router(problem_from_python(experts, router), workspace.topk_ids, workspace.topk_weights, seed);
  const DirectArgs args = {problem.moe, workspace.h};
  (problem.moe.weight_dtype == DType::kFloat8E4M3 ? run_direct<1> : run_direct<2>)(args, launch, seed);
}

// routing_only: stop before the first GEMM.
void emulate_grouped(const py::dict& experts, const py::object& router, const py::dict& workspace_fields,
                     const py::dict& launch_fields, uint64_t seed, bool routing_only) {
  const auto workspace = from_python<GroupedWorkspace>("workspace", workspace_fields);
  const auto launch = from_python<GroupedLaunch>("launch", launch_fields);
  const Problem problem =
      run_router(problem_from_python(experts, router), workspace.topk_ids, workspace.topk_weights, seed);
  run_routing(problem, workspace, launch, seed);
  if (routing_only) return;
  const auto run = launch.mode == GemmMode::kBf16  ? run_gemms<GemmMode::kBf16>
                   : launch.mode == GemmMode::kFp8 ? run_gemms<GemmMode::kFp8>
                                                   : run_gemms<GemmMode::kFp8Weights>;
  run(problem, workspace, launch, seed);
  const CombineArgs combine = combine_arguments(problem, workspace);
  const FusedExpertsArgs& moe = problem.moe;
  const int column_blocks = static_cast<int>((moe.hidden_size + 8 * kCombineThreads - 1) / (8 * kCombineThreads));
  for (int y = 0; y < column_blocks; ++y) {
    check(emulation::launch(
        static_cast<int>(moe.num_tokens), kCombineThreads, 0, seed, [&] { combine_kernel(combine); }, y));
  }
}

void emulate_router(const py::dict& experts, const py::object& router, uintptr_t ids, uintptr_t weights,
                    uint64_t seed) {
  run_router(problem_from_python(experts, router), reinterpret_cast<int*>(ids), reinterpret_cast<float*>(weights),
             seed);
}

template <int... kTokens>
std::vector<int> tile_list(std::integer_sequence<int, kTokens...>) {
  return {kTokens...};
}

// The compiled numbers that moe_optimizer/ops/launch_geometry repeats.
std::map<std::string, int64_t> compiled_constants() {
  return {
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
      {"grouped.QUEUE_SLOTS", kQueueSlots},
      {"grouped.QUEUE_BYTES", kQueueBytes},
      {"grouped.PAIRS_PER_BLOCK", kRoutePairs},
      {"grouped.ROUTE_WARPS", kRouteWarps},
      {"grouped.ROUTE_FIXED_BYTES", sizeof(RouteShared)},
  };
}

}  // namespace

PYBIND11_MODULE(emulated_kernels, module) {
  module.def("cuda_direct", &emulate_direct);
  module.def("cuda_grouped", &emulate_grouped, py::arg("experts"), py::arg("router"), py::arg("workspace"),
             py::arg("launch"), py::arg("seed"), py::arg("routing_only") = false);
  module.def("router", &emulate_router);
  module.attr("constants") = compiled_constants();
  module.attr("tiles") = std::vector<std::vector<int>>{tile_list(CompiledTiles<GemmMode::kBf16>()),
                                                       tile_list(CompiledTiles<GemmMode::kFp8Weights>()),
                                                       tile_list(CompiledTiles<GemmMode::kFp8>())};
}
