// Calls of the CPU experts that were checked and described once, found again by the tensors of a call: checking and
// describing them takes longer than the experts of a small layer.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "bindings/from_python.h"
#include "bindings/run_checked.h"
#include "bindings/tensor_view.h"
#include "int4_experts.h"
#include "moeopt/fused_experts.h"
#include "moeopt/router.h"

namespace moeopt {

class KnownCalls {
 public:
  // `tensor_type`: torch.Tensor. Throws ValueError where it cannot be read from here.
  explicit KnownCalls(const pybind11::handle& tensor_type) : reader_(tensor_type) {}

  // Computes a call that differs from a remembered one in its tokens alone; false: there is none, nothing was done.
  // `inputs`: of moe_optimizer/ops/expert_inputs.py; `zeros`: the zero points of INT4 weights, else empty.
  bool again(const pybind11::tuple& inputs, const pybind11::handle& out, const pybind11::tuple& zeros) {
    Tokens tokens;
    Call call;
    if (!read_routing(inputs, &tokens) || !find(inputs, out, zeros, tokens, &call)) return false;
    run_checked([&](RoutingError* error) { return run(call, error); });
    return true;
  }

  // The same of a call whose routing is chosen from logits [T, experts] first, by a softmax without groups or a bias.
  // The entries of `inputs` for it are not read.
  bool again_from_logits(const pybind11::tuple& inputs, const pybind11::handle& out, const pybind11::handle& logits,
                         int64_t top_k, bool renormalize) {
    TensorView scores;
    if (!reader_.read(logits.ptr(), &scores) || scores.num_dims != 2 || !scores.on_cpu() || scores.strides[1] != 1) {
      return false;
    }
    const int64_t num_tokens = scores.shape[0], num_experts = scores.shape[1];
    RouterArgs router{scores.data, false, Scoring::kSoftmax, renormalize, 1, 1, nullptr, 1.0f};
    TopkRouterArgs args{num_tokens, num_experts, top_k, scores.strides[0], DType::kFloat32, nullptr, nullptr};
    if (!dtype_of(scores, &args.logits_dtype) || top_k < 1 || top_k > num_experts) return false;

    const int64_t shape[] = {num_tokens, top_k}, strides[] = {top_k, 1};
    std::vector<float> weights(num_tokens * top_k);
    std::vector<int32_t> ids(num_tokens * top_k);
    Tokens tokens;
    tokens.weights = {reinterpret_cast<char*>(weights.data()), 1, 0, 2, kFloatCode, 32, 1, shape, strides, 0};
    tokens.ids = {reinterpret_cast<char*>(ids.data()), 1, 0, 2, kIntCode, 32, 1, shape, strides, 0};
    Call call;
    if (!find(inputs, out, pybind11::tuple(), tokens, &call)) return false;
    const FusedExpertsArgs& experts = call.experts;
    if (num_experts != (experts.expert_map ? experts.num_global_experts : experts.num_local_experts)) return false;
    args.topk_weights = weights.data();
    args.topk_ids = ids.data();
    run_checked([&](RoutingError* error) {
      topk_router_cpu(router, args);
      return run(call, error);
    });
    return true;
  }

  // Keeps a call. `experts`: FusedExpertsArgs; `w13`, `w2`: Int4Scales of INT4 weights, or None.
  void remember(const pybind11::tuple& inputs, const pybind11::handle& out, const pybind11::tuple& zeros,
                const pybind11::dict& experts, const pybind11::object& w13, const pybind11::object& w2) {
    Tokens tokens;
    if (!read_routing(inputs, &tokens) || !find_key(inputs, out, zeros, &tokens)) return;
    Call call{from_python<FusedExpertsArgs>("experts", experts), !w13.is_none(), {}, {}};
    if (call.int4) {
      call.w13 = from_python<Int4Scales>("w13", w13.cast<pybind11::dict>());
      call.w2 = from_python<Int4Scales>("w2", w2.cast<pybind11::dict>());
    }
    if (calls_.size() >= kMost) clear();
    calls_.insert_or_assign(key_, call);
  }

  void clear() { calls_.clear(); }
  size_t size() const { return calls_.size(); }

 private:
  // Chosen: more layers and kinds of calls than a process has; beyond, everything is forgotten once.
  static constexpr size_t kMost = 4096;
  static constexpr Py_ssize_t kInputs = 11;

  using Key = std::vector<int64_t>;
  struct Hash {
    size_t operator()(const Key& key) const {
      uint64_t hash = 0;
      for (int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15ull, hash ^= hash >> 32;
      return hash;
    }
  };
  struct Call {
    FusedExpertsArgs experts;
    bool int4;
    Int4Scales w13, w2;
  };
  // What belongs to the tokens of a call, and may differ from call to call in addresses and number.
  struct Tokens {
    TensorView x, out, weights, ids;
  };

  // Sets `call` to the remembered one, on the tokens of this.
  bool find(const pybind11::tuple& inputs, const pybind11::handle& out, const pybind11::tuple& zeros, Tokens& tokens,
            Call* call) {
    if (!find_key(inputs, out, zeros, &tokens)) return false;
    const auto found = calls_.find(key_);
    if (found == calls_.end() || overlaps_shifted(tokens)) return false;
    // A copy: while it runs, without the GIL, another thread may forget this one.
    *call = found->second;
    FusedExpertsArgs& args = call->experts;
    args.num_tokens = tokens.x.shape[0];
    args.x = tokens.x.data;
    args.out = tokens.out.data;
    args.topk_weights = reinterpret_cast<const float*>(tokens.weights.data);
    args.topk_ids = tokens.ids.data;
    return true;
  }

  bool run(const Call& call, RoutingError* error) const {
    if (call.int4) return int4_experts_cpu(call.experts, call.w13, call.w2, isa_, error);
    return fused_experts_cpu(call.experts, isa_, error);
  }

  bool read_routing(const pybind11::tuple& inputs, Tokens* tokens) const {
    return PyTuple_GET_SIZE(inputs.ptr()) == kInputs &&
           reader_.read(PyTuple_GET_ITEM(inputs.ptr(), 3), &tokens->weights) &&
           reader_.read(PyTuple_GET_ITEM(inputs.ptr(), 4), &tokens->ids);
  }

  // Sets key_ to everything that the checks and the description of a call depend on, but for its tokens. False: the
  // call has no tokens, or is none that passes the checks. Of `tokens` the routing is given.
  bool find_key(const pybind11::tuple& inputs, const pybind11::handle& out, const pybind11::tuple& zeros,
                Tokens* tokens) {
    if (PyTuple_GET_SIZE(inputs.ptr()) != kInputs) return false;
    const auto input = [&](int n) { return PyTuple_GET_ITEM(inputs.ptr(), n); };
    key_.clear();
    if (!reader_.read(input(0), &tokens->x) || !reader_.read(out.ptr(), &tokens->out)) return false;
    for (const TensorView* each : {&tokens->x, &tokens->out, &tokens->weights, &tokens->ids}) {
      if (each->num_dims != 2 || !each->on_cpu()) return false;
      key_.insert(key_.end(), {each->dtype(), each->shape[1], each->strides[0], each->strides[1]});
    }
    const int64_t count = tokens->x.shape[0], top_k = tokens->ids.shape[1];
    if (count == 0 || tokens->out.shape[0] != count || tokens->ids.shape[0] != count ||
        tokens->weights.shape[0] != count || tokens->out.shape[1] != tokens->x.shape[1] ||
        tokens->weights.shape[1] != top_k) {
      return false;
    }
    for (int n : {1, 2, 5, 6, 7, 8, 9}) {
      if (!add_constant(input(n))) return false;
    }
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(zeros.ptr()); ++n) {
      if (!add_constant(PyTuple_GET_ITEM(zeros.ptr(), n))) return false;
    }
    return add_name(input(10));
  }

  bool add_constant(PyObject* object) {
    if (object == Py_None) {
      key_.push_back(-1);
      return true;
    }
    TensorView view;
    if (!reader_.read(object, &view)) return false;
    const int64_t address = reinterpret_cast<int64_t>(view.data);
    key_.insert(key_.end(), {view.num_dims, view.dtype(), view.device(), address});
    key_.insert(key_.end(), view.shape, view.shape + view.num_dims);
    key_.insert(key_.end(), view.strides, view.strides + view.num_dims);
    return true;
  }

  bool add_name(PyObject* object) {
    Py_ssize_t size;
    const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
    if (text == nullptr) return false;
    key_.push_back(size);
    for (Py_ssize_t n = 0; n < size; ++n) key_.push_back(text[n]);
    return true;
  }

  // Whether out and x are shifted over each other, which the kernels cannot do in place.
  static bool overlaps_shifted(const Tokens& tokens) {
    const char *x = tokens.x.data, *out = tokens.out.data;
    const int64_t count = tokens.x.shape[0];
    return x != out && x < out + count * tokens.out.row_bytes() && out < x + count * tokens.x.row_bytes();
  }

  const TensorReader reader_;
  const Isa isa_ = best_isa();
  Key key_;
  std::unordered_map<Key, Call, Hash> calls_;
};

}  // namespace moeopt
