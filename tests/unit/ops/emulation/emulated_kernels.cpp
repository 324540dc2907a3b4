// The kernels of csrc/include/moeopt, run thread by thread on the CPU, as a Python module with the CUDA functions of
// csrc/bindings/module.cpp: `cuda_layout`, `cuda_run`. A seed takes the place of the stream.
//
// A deadlock, a misaligned access or a barrier used wrongly is a RuntimeError.
#include <pybind11/stl.h>
#include <cmath>

#include "bindings/from_python.h"
#include "emulated_device.h"
#include "launch/geometry.h"

using namespace moeopt;

namespace {

namespace py = pybind11;

void check(const std::string& failure) {
  if (!failure.empty()) throw std::runtime_error(failure);
}

template <int kWeightBits, bool kInt4 = false>
void run_direct(const DirectArgsOf<kInt4>& args, const DirectLaunch& launch, uint64_t seed) {
  check(emulation::launch(launch.up_grid, kDirectUpWarps * 32, static_cast<size_t>(launch.up_shared_bytes), seed, [&] {
    if constexpr (kWeightBits == 16) {
      if (launch.up_wide) return direct_up_kernel<kWeightBits, kDirectWide>(args);
    }
    direct_up_kernel<kWeightBits, kDirectNarrow, kInt4>(args);
  }));
  check(emulation::launch(launch.down_grid, kDirectDownWarps * 32, static_cast<size_t>(launch.down_shared_bytes), seed,
                          [&] {
                            if (launch.down_grid == args.moe.hidden_size / kDirectRows) {
                              direct_down_kernel<kWeightBits, true, kInt4>(args);
                            } else {
                              direct_down_kernel<kWeightBits, false, kInt4>(args);
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
                          static_cast<size_t>(launch.route_shared_bytes), seed, [&] {
                            const auto kernel = launch.mode == GemmMode::kMxfp4 ? count_pairs_kernel<true, true>
                                                : has_four_bits(launch.mode)    ? count_pairs_kernel<true, false>
                                                                                : count_pairs_kernel<false, false>;
                            kernel(args, prepare_arguments(problem, workspace, launch.mode));
                          }));
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

void run_experts(const Problem& given, const DirectWorkspace& workspace, const DirectLaunch& launch, uint64_t seed,
                 bool /*routing_only*/) {
  const Problem problem = run_router(given, workspace.topk_ids, workspace.topk_weights, seed);
  if (is_int4(problem)) {
    const DirectInt4Args args{problem.moe, workspace.h, w13_factors(problem.int4), w2_factors(problem.int4)};
    return run_direct<4, true>(args, launch, seed);
  }
  const DirectArgs args = {problem.moe, workspace.h};
  const int bits = weight_bits(problem.moe);
  (bits == 4 ? run_direct<4> : bits == 8 ? run_direct<8> : run_direct<16>)(args, launch, seed);
}

void run_experts(const Problem& given, const GroupedWorkspace& workspace, const GroupedLaunch& launch, uint64_t seed,
                 bool routing_only) {
  const Problem problem = run_router(given, workspace.topk_ids, workspace.topk_weights, seed);
  run_routing(problem, workspace, launch, seed);
  if (routing_only) return;
  const auto run = launch.mode == GemmMode::kBf16          ? run_gemms<GemmMode::kBf16>
                   : launch.mode == GemmMode::kFp8         ? run_gemms<GemmMode::kFp8>
                   : launch.mode == GemmMode::kFp8Weights  ? run_gemms<GemmMode::kFp8Weights>
                   : launch.mode == GemmMode::kInt4Weights ? run_gemms<GemmMode::kInt4Weights>
                   : launch.mode == GemmMode::kMxfp4       ? run_gemms<GemmMode::kMxfp4>
                                                           : run_gemms<GemmMode::kMxfp4Weights>;
  run(problem, workspace, launch, seed);
  const CombineArgs combine = combine_arguments(problem, workspace);
  const FusedExpertsArgs& moe = problem.moe;
  const int column_blocks = static_cast<int>((moe.hidden_size + 8 * kCombineThreads - 1) / (8 * kCombineThreads));
  for (int y = 0; y < column_blocks; ++y) {
    check(emulation::launch(
        static_cast<int>(moe.num_tokens), kCombineThreads, 0, seed, [&] { combine_kernel(combine); }, y));
  }
}

py::dict emulate_layout(const py::dict& experts, const py::object& router, const py::object& int4,
                        const py::dict& variant, int multiprocessors, uintptr_t buffer) {
  return layout_to_python(lay_out(problem_from_python(experts, router, int4), from_python<Variant>("variant", variant),
                                  multiprocessors, buffer, nullptr));
}

// routing_only: stop before the first GEMM.
void emulate_run(const py::dict& experts, const py::object& router, const py::object& int4, const py::dict& variant,
                 int multiprocessors, uintptr_t buffer, uintptr_t counters, uint64_t seed, bool routing_only) {
  const Problem problem = problem_from_python(experts, router, int4);
  const auto kernels = from_python<Variant>("variant", variant);
  const auto run = [&](const auto& layout) {
    run_experts(problem, layout.workspace, layout.launch, seed, routing_only);
  };
  std::visit(run, lay_out(problem, kernels, multiprocessors, buffer, reinterpret_cast<int*>(counters)));
}

void emulate_router(const py::dict& experts, const py::object& router, uintptr_t ids, uintptr_t weights,
                    uint64_t seed) {
  run_router(problem_from_python(experts, router, py::none()), reinterpret_cast<int*>(ids),
             reinterpret_cast<float*>(weights), seed);
}

// The values of 8 codes with the exponent of their group, as the kernels multiply and rescale them.
std::vector<double> mxfp4_values(uint32_t codes, uint32_t exponent) {
  uint32_t words[4];
  bf16_of_e2m1(codes, mxfp4_factor_of_byte(exponent), words);
  std::vector<double> values;
  for (int i = 0; i < 8; ++i) values.push_back(static_cast<double>(half_of(words[i % 4], i / 4)) * kMxfp4Rescale);
  return values;
}

// The values of 8 codes of a group in a row with this largest exponent, as E4M3 products have them.
std::vector<double> mxfp4_values_in_e4m3(uint32_t codes, uint32_t exponent, uint32_t largest) {
  const uint32_t below = largest - exponent;
  uint32_t words[2];
  e4m3_of_e2m1(codes, below > kMostPlainBinades ? e4m3_magnitudes_below(below) : e4m3_magnitudes(below), words);
  std::vector<double> values;
  for (int i = 0; i < 8; ++i) {
    values.push_back(static_cast<double>(float_from_e4m3(words[i / 4] >> 8 * (i % 4) & 0xffu)) *
                     static_cast<double>(mxfp4_row_scale(largest)));
  }
  return values;
}

// The weights of 8 codes, as the kernels multiply them.
std::vector<double> int4_values(uint32_t codes, uint32_t scale, uint32_t zero) {
  uint32_t words[4];
  bf16_of_int4(codes, int4_factor(scale, zero), words);
  std::vector<double> values;
  for (int i = 0; i < 8; ++i) values.push_back(static_cast<double>(half_of(words[i % 4], i / 4)));
  return values;
}

template <int... kTokens>
std::vector<int> tile_list(std::integer_sequence<int, kTokens...>) {
  return {kTokens...};
}

}  // namespace

PYBIND11_MODULE(emulated_kernels, module) {
  module.def("cuda_layout", &emulate_layout);
  module.def("cuda_run", &emulate_run, py::arg("experts"), py::arg("router"), py::arg("int4"), py::arg("variant"),
             py::arg("multiprocessors"), py::arg("buffer"), py::arg("counters"), py::arg("seed"),
             py::arg("routing_only") = false);
  module.def("router", &emulate_router);
  module.def("mxfp4_values", &mxfp4_values);
  module.def("mxfp4_values_in_e4m3", &mxfp4_values_in_e4m3);
  module.def("int4_values", &int4_values);
  module.attr("direct_limits") = std::pair<int, int>{kDirectTokens, kDirectPairs};
  module.attr("tiles") = std::vector<std::vector<int>>{
      tile_list(CompiledTiles<GemmMode::kBf16>()),        tile_list(CompiledTiles<GemmMode::kFp8Weights>()),
      tile_list(CompiledTiles<GemmMode::kFp8>()),         tile_list(CompiledTiles<GemmMode::kMxfp4Weights>()),
      tile_list(CompiledTiles<GemmMode::kInt4Weights>()), tile_list(CompiledTiles<GemmMode::kMxfp4>())};
}
