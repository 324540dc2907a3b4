// The extension module moe_optimizer.ops._kernels: addresses and sizes in, nothing checked but the routing.
// moe_optimizer/ops checks tensors before it calls, and is the only caller.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "bindings/decode_calls.h"
#include "bindings/few_row_calls.h"
#include "bindings/from_python.h"
#include "bindings/known_calls.h"
#include "bindings/run_checked.h"
#include "bindings/token_row_calls.h"
#include "int4_experts.h"
#include "moeopt/fused_experts.h"
#include "moeopt/router.h"
#include "paged_attention.h"
#include "sparse_experts.h"
#if defined(MOEOPT_CUDA)
#include "launch/cuda_kernels.h"
#endif

namespace py = pybind11;

namespace moeopt {
namespace {

Isa parse_isa(const std::string& name) {
  if (name.empty()) return best_isa();
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i) {
    if (name == isa_name(static_cast<Isa>(i))) return static_cast<Isa>(i);
  }
  throw std::invalid_argument("instruction set: got '" + name + "', expected one this machine has, up to '" +
                              isa_name(best_isa()) + "'");
}

void fused_experts(const py::dict& experts, const std::string& isa_name) {
  const auto args = from_python<FusedExpertsArgs>("experts", experts);
  const Isa isa = parse_isa(isa_name);
  run_checked([&](RoutingError* error) { return fused_experts_cpu(args, isa, error); });
}

void sparse_experts(const py::dict& experts, const py::dict& masks, const std::string& isa_name) {
  const auto args = from_python<FusedExpertsArgs>("experts", experts);
  const auto mask = from_python<SparseMasks>("masks", masks);
  const Isa isa = parse_isa(isa_name);
  run_checked([&](RoutingError* error) { return sparse_experts_cpu(args, mask, isa, error); });
}

// `w13`, `w2`: Int4Scales.
void int4_experts(const py::dict& experts, const py::dict& w13, const py::dict& w2, const std::string& isa_name) {
  const auto args = from_python<FusedExpertsArgs>("experts", experts);
  const auto w13_scales = from_python<Int4Scales>("w13", w13), w2_scales = from_python<Int4Scales>("w2", w2);
  const Isa isa = parse_isa(isa_name);
  run_checked([&](RoutingError* error) { return int4_experts_cpu(args, w13_scales, w2_scales, isa, error); });
}

void topk_router(const py::dict& router, const py::dict& call) {
  const auto rule = from_python<RouterArgs>("router", router);
  const auto args = from_python<TopkRouterArgs>("call", call);
  py::gil_scoped_release release;
  topk_router_cpu(rule, args);
}

// Throws ValueError if a context or a block is outside of what there is.
void paged_attention(const py::dict& call, const std::string& isa_name) {
  const auto args = from_python<PagedAttentionArgs>("call", call);
  const Isa isa = parse_isa(isa_name);
  PageError error{};
  {
    py::gil_scoped_release release;
    if (paged_attention_cpu(args, isa, &error)) return;
  }
  const std::string sequence = " for sequence " + std::to_string(error.sequence) + ", expected ";
  throw py::value_error(error.length ? "context_lengths: got " + std::to_string(error.got) + sequence + "0 to " +
                                           std::to_string(error.limit)
                                     : "block_tables: got block " + std::to_string(error.got) + sequence + "one of " +
                                           std::to_string(error.limit));
}

#if defined(MOEOPT_CUDA)
// `buffer`: of the workspace; 0 where only its size is asked for. ValueError: the variant does not cover the problem.
py::dict layout(const py::dict& experts, const py::object& router, const py::object& int4, const py::dict& variant,
                int multiprocessors, uintptr_t buffer) {
  return layout_to_python(cuda_layout(problem_from_python(experts, router, int4),
                                      from_python<Variant>("variant", variant), multiprocessors, buffer));
}

void run(const py::dict& experts, const py::object& router, const py::object& int4, const py::dict& variant,
         int multiprocessors, uintptr_t buffer, uintptr_t counters, uintptr_t stream) {
  const Problem problem = problem_from_python(experts, router, int4);
  const auto kernels = from_python<Variant>("variant", variant);
  py::gil_scoped_release release;
  run_cuda(problem, kernels, multiprocessors, buffer, reinterpret_cast<int*>(counters), stream);
}

// ValueError: no kernel covers the call.
py::dict gate_layout(const py::dict& gate, const py::dict& router) {
  return to_python(
      gate_topk_layout(from_python<GateTopkArgs>("gate", gate), from_python<RouterArgs>("router", router)));
}

void run_gate(const py::dict& gate, const py::dict& router, uintptr_t stream) {
  const auto args = from_python<GateTopkArgs>("gate", gate);
  const auto rule = from_python<RouterArgs>("router", router);
  py::gil_scoped_release release;
  run_gate_topk(args, rule, stream);
}

// ValueError: no kernel covers the call.
py::dict skinny_layout(const py::dict& gemm, int multiprocessors) {
  return to_python(skinny_gemm_layout(from_python<SkinnyGemmArgs>("gemm", gemm), multiprocessors));
}

void run_skinny(const py::dict& gemm, int multiprocessors, uintptr_t stream) {
  const auto args = from_python<SkinnyGemmArgs>("gemm", gemm);
  py::gil_scoped_release release;
  run_skinny_gemm(args, multiprocessors, stream);
}
#endif

}  // namespace
}  // namespace moeopt

PYBIND11_MODULE(_kernels, module) {
  using namespace moeopt;
  module.doc() = "Compiled kernels of moe_optimizer.ops; call them through that package.";
  module.def("best_isa", [] { return isa_name(best_isa()); }, "Best instruction set of this machine that was built.");
  module.def("fused_experts", &fused_experts, py::arg("experts"), py::arg("isa") = "");
  py::class_<KnownCalls>(module, "KnownCalls", "Calls of the experts that were described once, for other tokens.")
      .def(py::init<const py::handle&>(), py::arg("tensor_type"))
      .def("again", &KnownCalls::again, py::arg("inputs"), py::arg("out"), py::arg("zeros"))
      .def("again_from_logits", &KnownCalls::again_from_logits, py::arg("inputs"), py::arg("out"), py::arg("logits"),
           py::arg("top_k"), py::arg("renormalize"))
      .def("remember", &KnownCalls::remember, py::arg("inputs"), py::arg("out"), py::arg("zeros"), py::arg("experts"),
           py::arg("w13") = py::none(), py::arg("w2") = py::none())
      .def("clear", &KnownCalls::clear)
      .def("__len__", &KnownCalls::size);
  py::class_<TokenRowCalls>(module, "TokenRowCalls", "What a decoder layer does with rows between its products.")
      .def(py::init<const py::handle&>(), py::arg("tensor_type"))
      .def("add_rms_norm", &TokenRowCalls::add_rms_norm, py::arg("x"), py::arg("residual"), py::arg("weight"),
           py::arg("eps"), py::arg("sum"), py::arg("out"))
      .def("turn_heads", &TokenRowCalls::turn_heads, py::arg("x"), py::arg("num_heads"), py::arg("q_weight"),
           py::arg("k_weight"), py::arg("eps"), py::arg("cos"), py::arg("sin"))
      .def("store_rows", &TokenRowCalls::store_rows, py::arg("source"), py::arg("slots"), py::arg("target"));
  py::class_<DecodeCalls>(module, "DecodeCalls", "Layers of a few decoding tokens in one call each.")
      .def(py::init<const py::handle&>(), py::arg("tensor_type"))
      .def("attention", &DecodeCalls::attention, py::arg("x"), py::arg("qkv"), py::arg("qkv_bias"), py::arg("q_norm"),
           py::arg("k_norm"), py::arg("eps"), py::arg("cos"), py::arg("sin"), py::arg("cache"), py::arg("slots"),
           py::arg("tables"), py::arg("lengths"), py::arg("o"), py::arg("o_bias"), py::arg("out"));
  py::class_<FewRowCalls>(module, "FewRowCalls", "Products of few rows with a matrix.")
      .def(py::init<const py::handle&>(), py::arg("tensor_type"))
      .def(
          "multiply",
          [](const FewRowCalls& calls, const py::handle& x, const py::handle& weight, const py::handle& bias,
             const py::handle& out,
             const std::string& isa) { return calls.multiply(x, weight, bias, out, parse_isa(isa)); },
          py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("out"), py::arg("isa") = "");
  module.def("sparse_experts", &sparse_experts, py::arg("experts"), py::arg("masks"), py::arg("isa") = "");
  module.def("int4_experts", &int4_experts, py::arg("experts"), py::arg("w13"), py::arg("w2"), py::arg("isa") = "");
  module.def("topk_router", &topk_router, py::arg("router"), py::arg("call"));
  module.def("paged_attention", &paged_attention, py::arg("call"), py::arg("isa") = "");
#if defined(MOEOPT_CUDA)
  module.def("cuda_layout", &layout, "What a call launches, and the bytes of its workspace.");
  module.def("cuda_run", &run, "Enqueues a call on a stream.");
  module.def("cuda_gate_layout", &gate_layout, "What a call of the gate and top-k launches.");
  module.def("cuda_gate_run", &run_gate, "Enqueues it on a stream.");
  module.def("cuda_skinny_layout", &skinny_layout, "What a product of few tokens with a weight matrix launches.");
  module.def("cuda_skinny_run", &run_skinny, "Enqueues it on a stream.");
#endif
}
