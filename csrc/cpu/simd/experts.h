// The ExpertKernels of one instruction set and one pair of dtypes, on top of dot_rows.
//
//   x [token, H] --+-- dot_rows, 16 gate rows --> gate [n, 16] --+
//                  +-- dot_rows, 16 up rows   --> up   [n, 16] --+-- SwiGLU --> h [pair, 16 columns]
//
//   h [pair, I] ------ dot_rows, 16 rows of w2 --> y [n, 16] -- + bias, x router weight
//                                                  sum [token, 16 columns] += (FP32)
//
// n tokens of one expert, kChunkTokens at a time; all of this lies in the L1 and L2 caches of one core.
// FP8 rows are decoded exactly, so where they are decoded does not change a result.
//
// Internal linkage: see number_formats.h.
#pragma once

#include "../number_formats.h"
#include "activation.h"
#include "dot_rows.h"

namespace moeopt {
namespace {

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Rows that start at different offsets from a power of two do not compete for the same lines of a cache.
constexpr int64_t kRowPadBytes = 64;

// A thread's scratch memory.
template <typename Format>
struct Scratch {
  using Decoded = typename Format::Decoded;

  DotScratch<Format> dot;
  float* first;   // [kChunkTokens, kRows]
  float* second;  // [kChunkTokens, kRows]

  static int64_t state_bytes() {
    return kChunkTokens * kWideRows * static_cast<int64_t>(sizeof(typename Decoded::Vec));
  }
  static int64_t result_bytes() { return kChunkTokens * kRows * static_cast<int64_t>(sizeof(float)); }
  static int64_t decoded_stride(const FusedExpertsArgs& args) {
    const int64_t longest = args.hidden_size > args.intermediate_size ? args.hidden_size : args.intermediate_size;
    return aligned(longest) + kRowPadBytes;
  }
  static int64_t decoded_bytes(const FusedExpertsArgs& args) {
    const int64_t element_bytes = sizeof(typename Decoded::Weight);
    return Format::kDecodes ? kTileRows * decoded_stride(args) * element_bytes : 0;
  }
  static int64_t bytes(const FusedExpertsArgs& args) {
    return state_bytes() + 2 * result_bytes() + decoded_bytes(args);
  }

  Scratch(const FusedExpertsArgs& args, char* memory) {
    dot.state = reinterpret_cast<typename Decoded::Vec*>(memory);
    memory += state_bytes();
    first = reinterpret_cast<float*>(memory);
    second = reinterpret_cast<float*>(memory + result_bytes());
    dot.decoded = reinterpret_cast<typename Decoded::Weight*>(memory + 2 * result_bytes());
    dot.decoded_stride = decoded_stride(args);
  }
};

// One of the two weight tensors, seen as 16-row units.
template <typename Format>
struct WeightMatrix {
  const typename Format::Weight* weight;  // of the expert
  int64_t row_stride, rows, columns;
  ScaleKind scale_kind;
  const float* scale;  // of the expert
  const float* bias;   // of the expert, or null

  static WeightMatrix w13(const FusedExpertsArgs& args, int64_t expert) {
    return make(args.w13, args.w13_expert_stride, args.w13_row_stride, 2 * args.intermediate_size, args.hidden_size,
                args.scale_kind, args.w13_scale, args.w13_bias, expert);
  }
  static WeightMatrix w2(const FusedExpertsArgs& args, int64_t expert) {
    return make(args.w2, args.w2_expert_stride, args.w2_row_stride, args.hidden_size, args.intermediate_size,
                args.scale_kind, args.w2_scale, args.w2_bias, expert);
  }

  // Unit of the rows first, first + step, ...: its dot products lack the channel scale and the bias.
  WeightRows<Format> unit(int64_t first, int64_t step) const {
    const float* factors = nullptr;
    if (scale_kind == ScaleKind::kBlock128) {
      factors = scale + first / kScaleBlock * ((columns + kScaleBlock - 1) / kScaleBlock);
    }
    return {weight + first * row_stride, step * row_stride, columns, factors};
  }

  // What turns the dot products of that unit into its outputs: y * factor[n] + bias[n].
  void finish(int64_t first, int64_t step, float* factor, float* offset) const {
    for (int n = 0; n < kRows; ++n) {
      factor[n] = scale_kind == ScaleKind::kChannel ? scale[first + n * step] * Format::kUnit : 1.0f;
      offset[n] = bias ? bias[first + n * step] : 0.0f;
    }
  }

 private:
  static WeightMatrix make(const void* weight, int64_t expert_stride, int64_t row_stride, int64_t rows,
                           int64_t columns, ScaleKind kind, const float* scale, const float* bias, int64_t expert) {
    int64_t factors = 0;
    if (kind == ScaleKind::kChannel) factors = rows;
    if (kind == ScaleKind::kBlock128) {
      factors = ((rows + kScaleBlock - 1) / kScaleBlock) * ((columns + kScaleBlock - 1) / kScaleBlock);
    }
    return {static_cast<const typename Format::Weight*>(weight) + expert * expert_stride,
            row_stride,
            rows,
            columns,
            kind,
            scale ? scale + expert * factors : nullptr,
            bias ? bias + expert * rows : nullptr};
  }
};

// Tokens of the next chunk of `left` tokens: chunks of about the same size.
inline int64_t chunk_of(int64_t left) {
  const int64_t chunks = (left + kChunkTokens - 1) / kChunkTokens;
  return (left + chunks - 1) / chunks;
}

template <typename Format>
void gate_up(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, int64_t begin,
             int64_t end, char* memory) {
  using Simd = typename Format::Simd;
  constexpr int kVecs = kRows / Simd::kLanes;
  const Scratch<Format> scratch(args, memory);
  const WeightMatrix<Format> matrix = WeightMatrix<Format>::w13(args, run.expert);
  const bool alternating = args.activation == Activation::kSwigluOai;
  const int64_t step = alternating ? 2 : 1;

  for (int64_t i = begin; i < end; i += kRows) {
    const int64_t gate_first = step * i, up_first = alternating ? 2 * i + 1 : args.intermediate_size + i;
    const WeightRows<Format> gate_rows = matrix.unit(gate_first, step), up_rows = matrix.unit(up_first, step);
    const typename Format::Weight* after = i + kRows < end ? matrix.unit(step * (i + kRows), step).w : nullptr;
    float gate_factor[kRows], gate_offset[kRows], up_factor[kRows], up_offset[kRows];
    matrix.finish(gate_first, step, gate_factor, gate_offset);
    matrix.finish(up_first, step, up_factor, up_offset);

    for (int64_t p = run.begin, tokens; p < run.end; p += tokens) {
      tokens = chunk_of(run.end - p);
      const bool first_chunk = p == run.begin;  // what it fetches ahead is in the cache for the others
      const char* x[kChunkTokens];
      for (int64_t t = 0; t < tokens; ++t) x[t] = buffers.x + buffers.pairs[p + t].token * buffers.x_row_bytes;
      dot_rows<Format>(x, tokens, gate_rows, first_chunk ? up_rows.w : nullptr, scratch.dot, scratch.first);
      dot_rows<Format>(x, tokens, up_rows, first_chunk ? after : nullptr, scratch.dot, scratch.second);
      for (int64_t t = 0; t < tokens; ++t) {
        alignas(64) float values[kRows];
        for (int v = 0; v < kVecs; ++v) {
          const int at = v * Simd::kLanes;
          const auto gate = Simd::fmadd(Simd::load(scratch.first + t * kRows + at), Simd::load(gate_factor + at),
                                        Simd::load(gate_offset + at));
          const auto up = Simd::fmadd(Simd::load(scratch.second + t * kRows + at), Simd::load(up_factor + at),
                                      Simd::load(up_offset + at));
          Simd::store(values + at, activate<Simd>(args.activation, gate, up));
        }
        Format::store_activations(values, buffers.h + (p + t - buffers.h_first_pair) * buffers.h_row_bytes, i);
      }
    }
  }
}

template <typename Format>
void down(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, const ExpertRun* next,
          int64_t begin, int64_t end, char* memory) {
  using Simd = typename Format::Simd;
  constexpr int kVecs = kRows / Simd::kLanes;
  const Scratch<Format> scratch(args, memory);
  const WeightMatrix<Format> matrix = WeightMatrix<Format>::w2(args, run.expert);
  const typename Format::Weight* first_of_next = nullptr;
  if (next) first_of_next = WeightMatrix<Format>::w2(args, next->expert).unit(begin, 1).w;

  for (int64_t j = begin; j < end; j += kRows) {
    const WeightRows<Format> rows = matrix.unit(j, 1);
    const typename Format::Weight* after = first_of_next;
    if (j + kRows < end) after = matrix.unit(j + kRows, 1).w;
    float factor[kRows], offset[kRows];
    matrix.finish(j, 1, factor, offset);

    for (int64_t p = run.begin, tokens; p < run.end; p += tokens) {
      tokens = chunk_of(run.end - p);
      const char* h[kChunkTokens];
      for (int64_t t = 0; t < tokens; ++t) h[t] = buffers.h + (p + t - buffers.h_first_pair) * buffers.h_row_bytes;
      dot_rows<Format>(h, tokens, rows, p == run.begin ? after : nullptr, scratch.dot, scratch.first);
      for (int64_t t = 0; t < tokens; ++t) {
        const Pair pair = buffers.pairs[p + t];
        float* sum = buffers.sum + pair.token * buffers.sum_stride + j;
        for (int v = 0; v < kVecs; ++v) {
          const int at = v * Simd::kLanes;
          const auto y = Simd::fmadd(Simd::load(scratch.first + t * kRows + at), Simd::load(factor + at),
                                     Simd::load(offset + at));
          Simd::store(sum + at, Simd::fmadd(Simd::set1(pair.weight), y, Simd::load(sum + at)));
        }
      }
    }
  }
}

template <typename Format>
void store(const FusedExpertsArgs& args, const LayerBuffers& buffers, int64_t begin, int64_t end) {
  using Element = typename Format::Output;
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    Element* out = static_cast<Element*>(args.out) + t * args.out_stride;
    const float* sum = buffers.sum + t * buffers.sum_stride;
    for (int64_t j = begin; j < end; j += kRows) Format::store_output(sum + j, out + j);
  }
}

template <typename Format>
int64_t packed_x_row_bytes(const FusedExpertsArgs& args) {
  return Format::kPacks ? aligned(args.hidden_size) * Format::kActivationBytes + kRowPadBytes : 0;
}

template <typename Format>
void pack_x_row(const FusedExpertsArgs& args, int64_t token, char* row) {
  const auto* x = static_cast<const typename Format::Output*>(args.x) + token * args.x_stride;
  for (int64_t k = 0; k < args.hidden_size; k += kRows) {
    alignas(64) float values[kRows];
    for (int n = 0; n < kRows; ++n) values[n] = to_float(x[k + n]);
    Format::store_activations(values, row, k);
  }
}

template <typename Format>
int64_t h_row_bytes(const FusedExpertsArgs& args) {
  return aligned(args.intermediate_size) * Format::kActivationBytes + kRowPadBytes;
}

template <typename Format>
int64_t scratch_bytes(const FusedExpertsArgs& args) {
  return Scratch<Format>::bytes(args);
}

template <typename Format>
constexpr ExpertKernels kExperts = {packed_x_row_bytes<Format>, pack_x_row<Format>, h_row_bytes<Format>,
                                    scratch_bytes<Format>,      gate_up<Format>,    down<Format>,
                                    store<Format>};

}  // namespace
}  // namespace moeopt
