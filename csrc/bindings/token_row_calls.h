// token_rows.h on torch's tensors. Each returns whether it computed the call: it does nothing for tensors that are not
// as it reads them.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/tensor_view.h"
#include "token_rows.h"

namespace moeopt {

class TokenRowCalls {
 public:
  // `tensor_type`: torch.Tensor. Throws ValueError where it cannot be read from here.
  explicit TokenRowCalls(const pybind11::handle& tensor_type) : reader_(tensor_type) {}

  // x, residual, sum and out [T, H], weight [H].
  bool add_rms_norm(const pybind11::handle& x, const pybind11::handle& residual, const pybind11::handle& weight,
                    float eps, const pybind11::handle& sum, const pybind11::handle& out) const {
    TensorView one, other, factors, both, result;
    if (!read_rows(x, 2, &one) || !read_rows(weight, 1, &factors)) return false;
    const int64_t tokens = one.shape[0], size = one.shape[1];
    const auto read_like_x = [&](const pybind11::handle& tensor, TensorView* view) {
      return read_rows(tensor, 2, view) && view->shape[0] == tokens && view->shape[1] == size;
    };
    if (!read_like_x(residual, &other) || !read_like_x(sum, &both) || !read_like_x(out, &result)) return false;
    if (factors.shape[0] != size) return false;
    const pybind11::gil_scoped_release release;
    add_rms_norm_cpu(tokens, size, rows<const float>(one), rows<const float>(other), floats(factors), eps,
                     rows<float>(both), rows<float>(result));
    return true;
  }

  // x [T, N, d], whose first num_heads are queries; q_weight, k_weight [d] or None both; cos and sin [T, 1, d].
  bool turn_heads(const pybind11::handle& x, int64_t num_heads, const pybind11::handle& q_weight,
                  const pybind11::handle& k_weight, float eps, const pybind11::handle& cos,
                  const pybind11::handle& sin) const {
    TensorView heads, cosines, sines, weights[2];
    if (!read_rows(x, 3, &heads) || !read_rows(cos, 3, &cosines) || !read_rows(sin, 3, &sines)) return false;
    const int64_t tokens = heads.shape[0], count = heads.shape[1], size = heads.shape[2];
    if (size % 2 != 0 || heads.strides[1] != size || num_heads > count) return false;
    for (const TensorView* each : {&cosines, &sines}) {
      if (each->shape[0] != tokens || each->shape[1] != 1 || each->shape[2] != size) return false;
    }
    const bool normalized = !q_weight.is_none();
    if (normalized) {
      if (!read_rows(q_weight, 1, &weights[0]) || !read_rows(k_weight, 1, &weights[1])) return false;
      if (weights[0].shape[0] != size || weights[1].shape[0] != size) return false;
    }
    const Heads described{num_heads,
                          count - num_heads,
                          size,
                          normalized ? floats(weights[0]) : nullptr,
                          normalized ? floats(weights[1]) : nullptr,
                          eps};
    const pybind11::gil_scoped_release release;
    turn_heads_cpu(tokens, described, rows<float>(heads), rows<const float>(cosines), rows<const float>(sines));
    return true;
  }

  // source [T, K, d] of any dtype, slots int64 [T], target contiguous [B, S, K, d]: place slots[t] of B * S.
  bool store_rows(const pybind11::handle& source, const pybind11::handle& slots, const pybind11::handle& target) const {
    TensorView from, places, into;
    if (!reader_.read(source.ptr(), &from) || !reader_.read(slots.ptr(), &places) ||
        !reader_.read(target.ptr(), &into) || from.num_dims != 3 || places.num_dims != 1 || into.num_dims != 4) {
      return false;
    }
    const int64_t tokens = from.shape[0], row = from.shape[1] * from.shape[2];
    const bool is_known = from.on_cpu() && places.on_cpu() && into.on_cpu() && places.dtype_code == kIntCode &&
                          places.dtype_bits == 64 && places.shape[0] == tokens && from.dtype() == into.dtype() &&
                          into.shape[2] == from.shape[1] && into.shape[3] == from.shape[2];
    const bool lies_together = from.is_packed(1) && into.is_packed(0) && (places.strides[0] == 1 || tokens < 2);
    if (!is_known || !lies_together) return false;
    const int64_t bytes = from.dtype_bits / 8, num_slots = into.shape[0] * into.shape[1];
    return store_rows_cpu(tokens, row * bytes, {from.data, from.strides[0] * bytes},
                          reinterpret_cast<const int64_t*>(places.data), num_slots, into.data);
  }

 private:
  // Reads float32 on the CPU whose last dimension is contiguous.
  bool read_rows(const pybind11::handle& tensor, int32_t num_dims, TensorView* view) const {
    return reader_.read(tensor.ptr(), view) && view->num_dims == num_dims && view->on_cpu() &&
           view->dtype_code == kFloatCode && view->dtype_bits == 32 && view->is_packed(num_dims - 1);
  }

  static float* floats(const TensorView& view) { return reinterpret_cast<float*>(view.data); }

  template <typename T>
  static Rows<T> rows(const TensorView& view) {
    return {floats(view), view.strides[0]};
  }

  const TensorReader reader_;
};

}  // namespace moeopt
