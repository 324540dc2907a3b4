// few_rows.h on torch's tensors.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/tensor_view.h"
#include "few_rows.h"

namespace moeopt {

class FewRowCalls {
 public:
  // `tensor_type`: torch.Tensor. Throws ValueError where it cannot be read from here.
  explicit FewRowCalls(const pybind11::handle& tensor_type) : reader_(tensor_type) {}

  // out = x @ weight.T + bias; x [T, K], weight [N, K], bias [N] or None, out [T, N], all of one dtype, T at most
  // kMostFewRows. False, with nothing done: the tensors are not so, or a row of one is not contiguous.
  bool multiply(const pybind11::handle& x, const pybind11::handle& weight, const pybind11::handle& bias,
                const pybind11::handle& out, Isa isa) const {
    TensorView rows, matrix, offsets, result;
    FewRowsArgs args{};
    if (!read_like(x, 2, nullptr, &rows) || !dtype_of(rows, &args.dtype)) return false;
    if (!read_like(weight, 2, &rows, &matrix) || !read_like(out, 2, &rows, &result)) return false;
    args.num_rows = rows.shape[0];
    args.in_size = rows.shape[1];
    args.out_size = matrix.shape[0];
    if (args.num_rows > kMostFewRows || matrix.shape[1] != args.in_size || result.shape[0] != args.num_rows ||
        result.shape[1] != args.out_size) {
      return false;
    }
    if (!bias.is_none()) {
      if (!read_like(bias, 1, &rows, &offsets) || offsets.shape[0] != args.out_size) return false;
      args.bias = offsets.data;
    }
    args.x = rows.data;
    args.weight = matrix.data;
    args.out = result.data;
    args.x_stride = rows.strides[0];
    args.weight_stride = matrix.strides[0];
    args.out_stride = result.strides[0];
    const pybind11::gil_scoped_release release;
    few_rows_cpu(args, isa);
    return true;
  }

 private:
  // Reads a tensor on the CPU with contiguous rows, of the dtype of `like` if that is given.
  bool read_like(const pybind11::handle& tensor, int32_t num_dims, const TensorView* like, TensorView* view) const {
    return reader_.read(tensor.ptr(), view) && view->num_dims == num_dims && view->on_cpu() &&
           view->is_packed(num_dims - 1) && (like == nullptr || view->dtype() == like->dtype());
  }

  const TensorReader reader_;
};

}  // namespace moeopt
