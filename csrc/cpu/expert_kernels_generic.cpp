// The experts in portable C++: any machine, any dtype of the contract. The faster paths are held to it.
//
//   x row (FP32)            w13[e] row i, row I + i        w2[e] row j
//        |                          | to FP32 (x scale)         | to FP32 (x scale)
//        +----------- dot ----------+                           |
//                      | gate, up -> SwiGLU -> h (FP32) -- dot -+
//                                                           | x router weight
//                                                     sum[token, j]  (FP32, expert by expert)
#include <cmath>
#include <type_traits>

#include "expert_kernels.h"
#include "int4_experts.h"
#include "number_formats.h"

namespace moeopt {
namespace {

constexpr int64_t kLanes = 16;  // partial sums of a dot product; lets any compiler use vectors

// n is a multiple of kLanes.
float dot(const float* a, const float* b, int64_t n) {
  float sums[kLanes] = {};
  for (int64_t k = 0; k < n; k += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[k + lane] * b[k + lane];
  }
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

float sigmoid(float value) { return 1.0f / (1.0f + std::exp(-value)); }

float activate(Activation activation, float gate, float up) {
  if (activation == Activation::kSwigluOai) {
    // Comparisons, not fmin and fmax, which drop a NaN.
    const float clamped_gate = gate > 7.0f ? 7.0f : gate;
    const float clamped_up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return clamped_gate * sigmoid(1.702f * clamped_gate) * (clamped_up + 1.0f);
  }
  return gate * sigmoid(gate) * up;
}

// Row `row` of expert `expert` of a [E, rows, columns] weight, as FP32 with its scale applied.
template <typename W>
void load_row(const void* weight, const float* scale, const uint8_t* exponents, ScaleKind kind, int64_t expert_stride,
              int64_t row_stride, int64_t rows, int64_t columns, int64_t expert, int64_t row, float* out) {
  const W* source = static_cast<const W*>(weight) + expert * expert_stride + row * row_stride;
  if constexpr (std::is_same_v<W, Float4E2M1Pair>) {
    const uint8_t* groups = exponents + (expert * rows + row) * (columns / kScaleGroup);
    for (int64_t k = 0; k < columns; ++k) {
      const uint8_t code = k % 2 == 0 ? source[k / 2].bits & 15 : source[k / 2].bits >> 4;
      out[k] = fp4_e2m1_to_float(code) * e8m0_to_float(groups[k / kScaleGroup]);
    }
    return;
  } else if constexpr (std::is_same_v<W, Int4Pair>) {
    const Int4Scales& scales = *reinterpret_cast<const Int4Scales*>(exponents);
    const int64_t first = (expert * rows + row) * (columns / scales.group);
    for (int64_t k = 0; k < columns; ++k) {
      const int code = k % 2 == 0 ? source[k / 2].bits & 15 : source[k / 2].bits >> 4;
      const int64_t group = first + k / scales.group;
      const float factor =
          scales.scale_is_fp16 ? fp16_to_float(scales.scale[group]) : bf16_to_float(scales.scale[group]);
      out[k] = static_cast<float>(code - (scales.zero ? scales.zero[group] : kInt4SymmetricZero)) * factor;
    }
    return;
  } else {
    for (int64_t k = 0; k < columns; ++k) out[k] = to_float(source[k]);
  }
  if (kind == ScaleKind::kChannel) {
    const float factor = scale[expert * rows + row];
    for (int64_t k = 0; k < columns; ++k) out[k] *= factor;
  } else if (kind == ScaleKind::kBlock128) {
    const int64_t row_blocks = (rows + kScaleBlock - 1) / kScaleBlock;
    const int64_t column_blocks = (columns + kScaleBlock - 1) / kScaleBlock;
    const float* factors = scale + (expert * row_blocks + row / kScaleBlock) * column_blocks;
    for (int64_t k = 0; k < columns; ++k) out[k] *= factors[k / kScaleBlock];
  }
}

template <typename X>
int64_t packed_x_row_bytes(const FusedExpertsArgs& args) {
  return sizeof(X) == sizeof(float) ? 0 : args.hidden_size * static_cast<int64_t>(sizeof(float));
}

template <typename X>
void pack_x_row(const FusedExpertsArgs& args, int64_t token, char* row) {
  const X* source = static_cast<const X*>(args.x) + token * args.x_stride;
  float* target = reinterpret_cast<float*>(row);
  for (int64_t k = 0; k < args.hidden_size; ++k) target[k] = to_float(source[k]);
}

int64_t h_row_bytes(const FusedExpertsArgs& args) {
  return args.intermediate_size * static_cast<int64_t>(sizeof(float));
}

// Two rows of w13, or one of w2.
int64_t scratch_bytes(const FusedExpertsArgs& args) {
  const int64_t longest = args.hidden_size > args.intermediate_size ? args.hidden_size : args.intermediate_size;
  return 2 * longest * static_cast<int64_t>(sizeof(float));
}

template <typename W>
void gate_up(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, int64_t begin,
             int64_t end, char* scratch) {
  const int64_t H = args.hidden_size, I = args.intermediate_size;
  const bool interleaved = args.activation == Activation::kSwigluOai;
  float* gate_row = reinterpret_cast<float*>(scratch);
  float* up_row = gate_row + H;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t gate_index = interleaved ? 2 * i : i, up_index = interleaved ? 2 * i + 1 : I + i;
    const auto load_w13 = [&](int64_t row, float* out) {
      load_row<W>(args.w13, args.w13_scale, args.w13_exponents, args.scale_kind, args.w13_expert_stride,
                  args.w13_row_stride, 2 * I, H, run.expert, row, out);
    };
    load_w13(gate_index, gate_row);
    load_w13(up_index, up_row);
    const float* bias = args.w13_bias ? args.w13_bias + run.expert * 2 * I : nullptr;
    for (int64_t p = run.begin; p < run.end; ++p) {
      const float* x = reinterpret_cast<const float*>(buffers.x + buffers.pairs[p].token * buffers.x_row_bytes);
      float* h = reinterpret_cast<float*>(buffers.h + (p - buffers.h_first_pair) * buffers.h_row_bytes);
      const float gate = dot(x, gate_row, H) + (bias ? bias[gate_index] : 0.0f);
      const float up = dot(x, up_row, H) + (bias ? bias[up_index] : 0.0f);
      h[i] = activate(args.activation, gate, up);
    }
  }
}

template <typename W>
void down(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, const ExpertRun* /*next*/,
          int64_t begin, int64_t end, char* scratch) {
  const int64_t H = args.hidden_size, I = args.intermediate_size;
  float* row = reinterpret_cast<float*>(scratch);
  for (int64_t j = begin; j < end; ++j) {
    load_row<W>(args.w2, args.w2_scale, args.w2_exponents, args.scale_kind, args.w2_expert_stride, args.w2_row_stride,
                H, I, run.expert, j, row);
    const float bias = args.w2_bias ? args.w2_bias[run.expert * H + j] : 0.0f;
    for (int64_t p = run.begin; p < run.end; ++p) {
      const float* h = reinterpret_cast<const float*>(buffers.h + (p - buffers.h_first_pair) * buffers.h_row_bytes);
      const Pair pair = buffers.pairs[p];
      buffers.sum[pair.token * buffers.sum_stride + j] += pair.weight * (dot(h, row, I) + bias);
    }
  }
}

template <typename X>
void store(const FusedExpertsArgs& args, const LayerBuffers& buffers, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    X* out = static_cast<X*>(args.out) + t * args.out_stride;
    for (int64_t j = begin; j < end; ++j) from_float(buffers.sum[t * buffers.sum_stride + j], &out[j]);
  }
}

template <typename X, typename W>
constexpr ExpertKernels kTable = {
    packed_x_row_bytes<X>, pack_x_row<X>, h_row_bytes, scratch_bytes, gate_up<W>, down<W>, store<X>};

// Weights have the dtype of x, or are FP8 or FP4.
template <typename X>
const ExpertKernels* for_weights(DType weight_dtype) {
  if (weight_dtype == DType::kFloat4E2M1) return &kTable<X, Float4E2M1Pair>;
  return weight_dtype == DType::kFloat8E4M3 ? &kTable<X, Float8E4M3> : &kTable<X, X>;
}

}  // namespace

const ExpertKernels* generic_int4_kernels(DType x_dtype) {
  switch (x_dtype) {
    case DType::kFloat32: return &kTable<float, Int4Pair>;
    case DType::kBFloat16: return &kTable<BFloat16, Int4Pair>;
    case DType::kFloat16: return &kTable<Float16, Int4Pair>;
    case DType::kFloat8E4M3:
    case DType::kFloat4E2M1: return nullptr;
  }
  return nullptr;
}

const ExpertKernels* generic_kernels(const FusedExpertsArgs& args) {
  switch (args.x_dtype) {
    case DType::kFloat32: return for_weights<float>(args.weight_dtype);
    case DType::kBFloat16: return for_weights<BFloat16>(args.weight_dtype);
    case DType::kFloat16: return for_weights<Float16>(args.weight_dtype);
    case DType::kFloat8E4M3:
    case DType::kFloat4E2M1: return nullptr;
  }
  return nullptr;
}

}  // namespace moeopt
