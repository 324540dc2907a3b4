// The extension module moe_optimizer.ops._kernels: addresses and sizes in, nothing checked but the routing.
// moe_optimizer/ops checks tensors before it calls, and is the only caller.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "moeopt/fused_experts.h"
#include "moeopt/topk_router.h"
#include "sparse_experts.h"
#if defined(MOEOPT_CUDA)
#include "bindings/cuda.h"
#endif

namespace py = pybind11;

namespace moeopt {
namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Isa parse_isa(const std::string& name) {
  if (name.empty()) return best_isa();
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i) {
    if (name == isa_name(static_cast<Isa>(i))) return static_cast<Isa>(i);
  }
  throw std::invalid_argument("instruction set: got '" + name + "', expected one this machine has, up to '" +
                              isa_name(best_isa()) + "'");
}

[[noreturn]] void fail(const RoutingError& error) {
  throw py::value_error((error.mapped ? "expert_map: returns local expert " : "topk_ids: got expert ") +
                        std::to_string(error.id) + " for token " + std::to_string(error.token) + ", slot " +
                        std::to_string(error.slot) + ", expected below " + std::to_string(error.limit) +
                        ", or negative to skip");
}

void set_routing(const std::tuple<uintptr_t, uintptr_t, bool, uintptr_t>& routing, FusedExpertsArgs* args) {
  const auto [topk_weights, topk_ids, ids_are_int64, expert_map] = routing;
  args->topk_weights = pointer<const float>(topk_weights);
  args->topk_ids = pointer<const void>(topk_ids);
  args->ids_are_int64 = ids_are_int64;
  args->expert_map = pointer<const int32_t>(expert_map);
}

void fused_experts(std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> sizes,
                   std::tuple<uintptr_t, int64_t, uintptr_t, int64_t, int32_t> activations,
                   std::tuple<uintptr_t, int64_t, int64_t, uintptr_t, int64_t, int64_t, int32_t> weights,
                   std::tuple<int32_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t> scales_and_biases,
                   std::tuple<uintptr_t, uintptr_t, bool, uintptr_t> routing, int32_t activation,
                   const std::string& isa_wanted) {
  FusedExpertsArgs args{};
  std::tie(args.num_tokens, args.hidden_size, args.intermediate_size, args.num_local_experts, args.num_global_experts,
           args.top_k) = sizes;

  const auto [x, x_stride, out, out_stride, x_dtype] = activations;
  args.x = pointer<const void>(x);
  args.x_stride = x_stride;
  args.out = pointer<void>(out);
  args.out_stride = out_stride;
  args.x_dtype = static_cast<DType>(x_dtype);

  const auto [w13, w13_expert, w13_row, w2, w2_expert, w2_row, weight_dtype] = weights;
  args.w13 = pointer<const void>(w13);
  args.w13_expert_stride = w13_expert;
  args.w13_row_stride = w13_row;
  args.w2 = pointer<const void>(w2);
  args.w2_expert_stride = w2_expert;
  args.w2_row_stride = w2_row;
  args.weight_dtype = static_cast<DType>(weight_dtype);

  const auto [scale_kind, w13_scale, w2_scale, w13_bias, w2_bias] = scales_and_biases;
  args.scale_kind = static_cast<ScaleKind>(scale_kind);
  args.w13_scale = pointer<const float>(w13_scale);
  args.w2_scale = pointer<const float>(w2_scale);
  args.w13_bias = pointer<const float>(w13_bias);
  args.w2_bias = pointer<const float>(w2_bias);

  set_routing(routing, &args);
  args.activation = static_cast<Activation>(activation);

  const Isa isa = parse_isa(isa_wanted);
  RoutingError error{};
  bool valid;
  {
    py::gil_scoped_release release;
    valid = fused_experts_cpu(args, isa, &error);
  }
  if (!valid) fail(error);
}

void sparse_experts(std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> sizes,
                    std::tuple<uintptr_t, int64_t, uintptr_t, int64_t> activations,
                    std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t> weights,
                    std::tuple<uintptr_t, uintptr_t, bool, uintptr_t> routing, const std::string& isa_wanted) {
  FusedExpertsArgs args{};
  std::tie(args.num_tokens, args.hidden_size, args.intermediate_size, args.num_local_experts, args.num_global_experts,
           args.top_k) = sizes;
  const auto [x, x_stride, out, out_stride] = activations;
  args.x = pointer<const void>(x);
  args.x_stride = x_stride;
  args.out = pointer<void>(out);
  args.out_stride = out_stride;
  args.x_dtype = DType::kBFloat16;
  const auto [w13, w13_mask, w2, w2_mask] = weights;
  args.w13 = pointer<const void>(w13);
  args.w2 = pointer<const void>(w2);
  args.weight_dtype = DType::kBFloat16;
  set_routing(routing, &args);

  const Isa isa = parse_isa(isa_wanted);
  RoutingError error{};
  bool valid;
  {
    py::gil_scoped_release release;
    valid = sparse_experts_cpu(args, pointer<const uint8_t>(w13_mask), pointer<const uint8_t>(w2_mask), isa, &error);
  }
  if (!valid) fail(error);
}

void topk_router(std::tuple<int64_t, int64_t, int64_t> sizes, std::tuple<uintptr_t, int64_t, int32_t> logits,
                 std::tuple<int32_t, bool, int64_t, int64_t, uintptr_t, float> rule,
                 std::tuple<uintptr_t, uintptr_t> outputs) {
  TopkRouterArgs args{};
  std::tie(args.num_tokens, args.num_experts, args.top_k) = sizes;
  const auto [address, stride, dtype] = logits;
  args.logits = pointer<const void>(address);
  args.logits_stride = stride;
  args.logits_dtype = static_cast<DType>(dtype);
  const auto [scoring, renormalize, num_groups, kept_groups, score_bias, scaling_factor] = rule;
  args.scoring = static_cast<Scoring>(scoring);
  args.renormalize = renormalize;
  args.num_groups = num_groups;
  args.kept_groups = kept_groups;
  args.score_bias = pointer<const float>(score_bias);
  args.scaling_factor = scaling_factor;
  const auto [topk_weights, topk_ids] = outputs;
  args.topk_weights = pointer<float>(topk_weights);
  args.topk_ids = pointer<int32_t>(topk_ids);
  py::gil_scoped_release release;
  topk_router_cpu(args);
}

}  // namespace
}  // namespace moeopt

PYBIND11_MODULE(_kernels, module) {
  using namespace moeopt;
  module.doc() = "Compiled kernels of moe_optimizer.ops; call them through that package.";
  module.def("best_isa", [] { return isa_name(best_isa()); }, "Best instruction set of this machine that was built.");
  module.def("fused_experts", &fused_experts, py::arg("sizes"), py::arg("activations"), py::arg("weights"),
             py::arg("scales_and_biases"), py::arg("routing"), py::arg("activation"), py::arg("isa") = "");
  module.def("sparse_experts", &sparse_experts, py::arg("sizes"), py::arg("activations"), py::arg("weights"),
             py::arg("routing"), py::arg("isa") = "");
  module.def("topk_router", &topk_router, py::arg("sizes"), py::arg("logits"), py::arg("rule"), py::arg("outputs"));
#if defined(MOEOPT_CUDA)
  bind_cuda(module);
#endif
}
