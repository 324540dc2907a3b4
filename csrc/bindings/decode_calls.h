// The attention layer of a few decoding tokens in one call: called one by one from Python, its steps take longer than
// their work in a small layer.
#pragma once

#include <pybind11/pybind11.h>

#include <cmath>
#include <vector>

#include "bindings/tensor_view.h"
#include "few_rows.h"
#include "paged_attention.h"
#include "token_rows.h"

namespace moeopt {

class DecodeCalls {
 public:
  // `tensor_type`: torch.Tensor. Throws ValueError where it cannot be read from here.
  explicit DecodeCalls(const pybind11::handle& tensor_type) : reader_(tensor_type) {}

  // out = attention of x, one token of each of T sequences, T at most kMostFewRows; all in FP32.
  //
  // x [T, C], qkv [(H + 2K) d, C] with a bias or None, q_norm and k_norm [d] or None both, cos and sin [T, 1, d],
  // cache [2, blocks, block size, K, d], slots int64 [T], tables int32 [T, N], lengths int64 [T], o [C, H d] with a
  // bias or None, out [T, C]. False, with nothing written but slots: the tensors are not so, or name no place.
  bool attention(const pybind11::handle& x, const pybind11::handle& qkv, const pybind11::handle& qkv_bias,
                 const pybind11::handle& q_norm, const pybind11::handle& k_norm, float eps, const pybind11::handle& cos,
                 const pybind11::handle& sin, const pybind11::handle& cache, const pybind11::handle& slots,
                 const pybind11::handle& tables, const pybind11::handle& lengths, const pybind11::handle& o,
                 const pybind11::handle& o_bias, const pybind11::handle& out) const {
    TensorView pages, rows, places, table, contexts;
    if (!read(cache, kFloatCode, 32, 5, 0, &pages) || !read(x, kFloatCode, 32, 2, 1, &rows)) return false;
    const int64_t tokens = rows.shape[0], kv_heads = pages.shape[3], d = pages.shape[4];
    TensorView in, result;
    if (!read(qkv, kFloatCode, 32, 2, 1, &in) || !read(o, kFloatCode, 32, 2, 1, &result) || d <= 0 || d % 2 != 0) {
      return false;
    }
    const int64_t heads = result.shape[1] / d, wide = (heads + 2 * kv_heads) * d;
    const bool fits = tokens <= kMostFewRows && kv_heads > 0 && heads % kv_heads == 0 && heads * d == result.shape[1] &&
                      in.shape[0] == wide && in.shape[1] == rows.shape[1] && pages.shape[0] == 2 && pages.shape[2] > 0;
    if (!fits || !read(slots, kIntCode, 64, 1, 0, &places) || !read(tables, kIntCode, 32, 2, 1, &table) ||
        !read(lengths, kIntCode, 64, 1, 0, &contexts) || places.shape[0] != tokens || table.shape[0] != tokens ||
        contexts.shape[0] != tokens) {
      return false;
    }
    TensorView cosines, sines, target;
    const float *norms[2] = {}, *biases[2] = {};
    if (!read(out, kFloatCode, 32, 2, 1, &target) || target.shape[0] != tokens || target.shape[1] != result.shape[0] ||
        !read(cos, kFloatCode, 32, 3, 2, &cosines) || !read(sin, kFloatCode, 32, 3, 2, &sines) ||
        !read_vector(q_norm, d, &norms[0]) || !read_vector(k_norm, d, &norms[1]) || !norms[0] != !norms[1] ||
        !read_vector(qkv_bias, wide, &biases[0]) || !read_vector(o_bias, result.shape[0], &biases[1])) {
      return false;
    }
    for (const TensorView* each : {&cosines, &sines}) {
      if (each->shape[0] != tokens || each->shape[1] != 1 || each->shape[2] != d) return false;
    }

    const pybind11::gil_scoped_release release;
    static thread_local std::vector<float> scratch;
    scratch.resize(tokens * (wide + heads * d));
    float *const projected = scratch.data(), *const attended = projected + tokens * wide;
    few_rows_cpu({tokens, rows.shape[1], wide, DType::kFloat32, rows.data, in.data, biases[0], projected,
                  rows.strides[0], in.strides[0], wide},
                 isa_);
    turn_heads_cpu(tokens, {heads, kv_heads, d, norms[0], norms[1], eps}, {projected, wide},
                   {floats(cosines), cosines.strides[0]}, {floats(sines), sines.strides[0]});
    const int64_t num_slots = pages.shape[1] * pages.shape[2], row_bytes = kv_heads * d * 4;
    char* const halves[2] = {pages.data, pages.data + num_slots * row_bytes};
    for (int half = 0; half < 2; ++half) {
      const char* source = reinterpret_cast<const char*>(projected + (heads + half * kv_heads) * d);
      const auto* to = reinterpret_cast<const int64_t*>(places.data);
      if (!store_rows_cpu(tokens, row_bytes, {source, wide * 4}, to, num_slots, halves[half])) return false;
    }
    const PagedAttentionArgs args{tokens,
                                  heads,
                                  kv_heads,
                                  d,
                                  pages.shape[1],
                                  pages.shape[2],
                                  DType::kFloat32,
                                  projected,
                                  halves[0],
                                  halves[1],
                                  attended,
                                  wide,
                                  d,
                                  heads * d,
                                  d,
                                  reinterpret_cast<const int32_t*>(table.data),
                                  table.shape[1],
                                  table.strides[0],
                                  reinterpret_cast<const int64_t*>(contexts.data),
                                  static_cast<float>(std::pow(static_cast<double>(d), -0.5))};
    PageError error{};
    if (!paged_attention_cpu(args, isa_, &error)) return false;
    few_rows_cpu({tokens, heads * d, result.shape[0], DType::kFloat32, attended, result.data, biases[1], target.data,
                  heads * d, result.strides[0], target.strides[0]},
                 isa_);
    return true;
  }

 private:
  // Reads a tensor on the CPU whose dimensions from `packed` on lie together.
  bool read(const pybind11::handle& tensor, uint8_t code, uint8_t bits, int32_t num_dims, int32_t packed,
            TensorView* view) const {
    return reader_.read(tensor.ptr(), view) && view->num_dims == num_dims && view->on_cpu() &&
           view->dtype_code == code && view->dtype_bits == bits && view->is_packed(packed);
  }

  // None: null.
  bool read_vector(const pybind11::handle& tensor, int64_t size, const float** values) const {
    TensorView view;
    if (tensor.is_none()) return true;
    if (!read(tensor, kFloatCode, 32, 1, 0, &view) || view.shape[0] != size) return false;
    *values = floats(view);
    return true;
  }

  static float* floats(const TensorView& view) { return reinterpret_cast<float*>(view.data); }

  const TensorReader reader_;
  const Isa isa_ = best_isa();
};

}  // namespace moeopt
