// The ExpertKernels of one instruction set and one pair of dtypes, on top of dot_rows.
//
//   x [token, H] --+-- dot_rows, 16 gate rows --> gate [n, 16] --+
//                  +-- dot_rows, 16 up rows   --> up   [n, 16] --+-- SwiGLU --> h [pair, 16 columns]
//
//   h [pair, I] ------ dot_rows, 16 rows of w2 --> y [n, 16] -- + bias, x router weight
//                                                  sum [token, 16 columns] += (FP32)
//
// n tokens of one expert, kChunkTokens at a time; all of this lies in the L1 and L2 caches of one core.
// FP8 rows are converted exactly, so where they are converted does not change a result.
//
// Internal linkage: see number_formats.h.
#pragma once

#include "../number_formats.h"
#include "activation.h"
#include "dot_rows.h"

namespace moeopt {
namespace {

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// A thread's scratch memory.
template <typename Format>
struct Scratch {
  using Decoded = typename Format::Decoded;

  typename Decoded::Vec* state;         // [kChunkTokens * kRows]
  float* first;                         // [kChunkTokens, kRows]
  float* second;                        // [kChunkTokens, kRows]
  typename Decoded::Weight* decoded[2];  // [kRows, longest row] each; unused where Decoded is Format

  static int64_t state_bytes() { return kChunkTokens * kRows * static_cast<int64_t>(sizeof(typename Decoded::Vec)); }
  static int64_t result_bytes() { return kChunkTokens * kRows * static_cast<int64_t>(sizeof(float)); }
  static int64_t row_elements(const FusedExpertsArgs& args) {
    return aligned(args.hidden_size > args.intermediate_size ? args.hidden_size : args.intermediate_size);
  }
  static int64_t decoded_bytes(const FusedExpertsArgs& args) {
    return Format::kDecodes ? kRows * row_elements(args) * static_cast<int64_t>(sizeof(typename Decoded::Weight)) : 0;
  }
  static int64_t bytes(const FusedExpertsArgs& args) {
    return state_bytes() + 2 * result_bytes() + 2 * decoded_bytes(args);
  }

  Scratch(const FusedExpertsArgs& args, char* memory) {
    state = reinterpret_cast<typename Decoded::Vec*>(memory);
    memory += state_bytes();
    first = reinterpret_cast<float*>(memory);
    second = reinterpret_cast<float*>(memory + result_bytes());
    memory += 2 * result_bytes();
    decoded[0] = reinterpret_cast<typename Decoded::Weight*>(memory);
    decoded[1] = reinterpret_cast<typename Decoded::Weight*>(memory + decoded_bytes(args));
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

// 16 rows of weights and the tokens that pass over them.
//   one or two tokens           FP8 is converted in the registers
//   one register tile of them   4 rows are converted into L1, multiplied, then the next 4
//   more                        16 rows are converted into L2, all tokens pass over them
template <typename Format>
class Unit {
 public:
  using Decoded = typename Format::Decoded;

  // `tokens`: of the whole run; dot() gets them in chunks. `memory`: room for 16 converted rows.
  Unit(const WeightRows<Format>& rows, int64_t tokens, typename Decoded::Weight* memory, int64_t memory_stride)
      : rows_(rows), memory_(memory), decoded_{memory, memory_stride, rows.columns, rows.scale}, tokens_(tokens) {}

  // `next`: the rows wanted after these, or null. `first_chunk`: of the run; FP8 is converted then.
  void dot(const char* const* x, int64_t tokens, const typename Format::Weight* next, bool first_chunk,
           typename Decoded::Vec* state, float* out) const {
    // What is fetched ahead is in the cache after the first chunk.
    const NextRows ahead{first_chunk ? reinterpret_cast<const char*>(next) : nullptr,
                         rows_.row_stride * static_cast<int64_t>(sizeof(typename Format::Weight))};
    if (tokens_ <= Format::kMaxTokens) return dot_few<Format>(x, tokens, rows_, ahead, out);
    if constexpr (!Format::kDecodes) {
      dot_many<Format>(x, tokens, rows_, ahead, state, out);
    } else if (tokens_ <= Decoded::kMaxTokens) {
      dot_few_decoded(x, tokens, ahead, out);
    } else {
      NextRows rest = ahead;
      if (first_chunk) rest = decode(0, kRows, ahead);
      dot_many<Decoded>(x, tokens, decoded_, rest, state, out);
    }
  }

 private:
  // Converts rows, fetching the first half of as many `next` rows meanwhile; returns the other half.
  NextRows decode(int first, int count, NextRows next) const {
    const int64_t half = next.row_bytes / 2 / kLineBytes * kLineBytes;
    const char* ahead = next.first;
    for (int n = first; n < first + count; ++n) {
      Format::decode_row(rows_.row(n), rows_.columns, memory_ + n * decoded_.row_stride, ahead);
      if (ahead) ahead += half;
    }
    return {ahead, next.row_bytes - half};
  }

  void dot_few_decoded(const char* const* x, int64_t tokens, NextRows next, float* out) const {
    for (int r = 0; r < kRows; r += kTileRows) {
      const bool more = r + kTileRows < kRows;
      const NextRows following{more ? reinterpret_cast<const char*>(rows_.row(r + kTileRows)) : next.first,
                               next.row_bytes};
      const NextRows rest = decode(r, kTileRows, following);
      Block<Decoded> block{};
      block.w = decoded_.row(r);
      block.row_stride = decoded_.row_stride;
      block.end = decoded_.columns;
      block.first = block.last = true;
      block.scale = decoded_.scale;
      block.ahead = rest.first;
      block.ahead_bytes = kTileRows * rest.row_bytes / (block.steps() + 1) + 1;
      if (block.ahead) {
        tile_of<Decoded, Ahead::kStream>(tokens, x, block, nullptr, out + r);
      } else {
        tile_of<Decoded, Ahead::kNothing>(tokens, x, block, nullptr, out + r);
      }
    }
  }

  WeightRows<Format> rows_;
  typename Decoded::Weight* memory_;
  WeightRows<Decoded> decoded_;  // over memory_
  int64_t tokens_;
};

template <typename Format>
void gate_up(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, int64_t begin,
             int64_t end, char* memory) {
  using Simd = typename Format::Simd;
  constexpr int kVecs = kRows / Simd::kLanes;
  const Scratch<Format> scratch(args, memory);
  const WeightMatrix<Format> matrix = WeightMatrix<Format>::w13(args, run.expert);
  const bool alternating = args.activation == Activation::kSwigluOai;
  const int64_t step = alternating ? 2 : 1;
  const int64_t longest = Scratch<Format>::row_elements(args);

  for (int64_t i = begin; i < end; i += kRows) {
    const int64_t gate_first = step * i, up_first = alternating ? 2 * i + 1 : args.intermediate_size + i;
    const WeightRows<Format> up_rows = matrix.unit(up_first, step);
    const Unit<Format> gate_unit(matrix.unit(gate_first, step), run.end - run.begin, scratch.decoded[0], longest);
    const Unit<Format> up_unit(up_rows, run.end - run.begin, scratch.decoded[1], longest);
    const typename Format::Weight* after = i + kRows < end ? matrix.unit(step * (i + kRows), step).w : nullptr;
    float gate_factor[kRows], gate_offset[kRows], up_factor[kRows], up_offset[kRows];
    matrix.finish(gate_first, step, gate_factor, gate_offset);
    matrix.finish(up_first, step, up_factor, up_offset);

    for (int64_t p = run.begin; p < run.end; p += kChunkTokens) {
      const int64_t tokens = run.end - p < kChunkTokens ? run.end - p : kChunkTokens;
      const char* x[kChunkTokens];
      for (int64_t t = 0; t < tokens; ++t) x[t] = buffers.x + buffers.pairs[p + t].token * buffers.x_row_bytes;
      gate_unit.dot(x, tokens, up_rows.w, p == run.begin, scratch.state, scratch.first);
      up_unit.dot(x, tokens, after, p == run.begin, scratch.state, scratch.second);
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
void down(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, int64_t begin, int64_t end,
          char* memory) {
  using Simd = typename Format::Simd;
  constexpr int kVecs = kRows / Simd::kLanes;
  const Scratch<Format> scratch(args, memory);
  const WeightMatrix<Format> matrix = WeightMatrix<Format>::w2(args, run.expert);
  const int64_t longest = Scratch<Format>::row_elements(args);

  for (int64_t j = begin; j < end; j += kRows) {
    const Unit<Format> unit(matrix.unit(j, 1), run.end - run.begin, scratch.decoded[0], longest);
    const typename Format::Weight* after = j + kRows < end ? matrix.unit(j + kRows, 1).w : nullptr;
    float factor[kRows], offset[kRows];
    matrix.finish(j, 1, factor, offset);

    for (int64_t p = run.begin; p < run.end; p += kChunkTokens) {
      const int64_t tokens = run.end - p < kChunkTokens ? run.end - p : kChunkTokens;
      const char* h[kChunkTokens];
      for (int64_t t = 0; t < tokens; ++t) h[t] = buffers.h + (p + t - buffers.h_first_pair) * buffers.h_row_bytes;
      unit.dot(h, tokens, after, p == run.begin, scratch.state, scratch.first);
      for (int64_t t = 0; t < tokens; ++t) {
        const Pair pair = buffers.pairs[p + t];
        float* sum = buffers.sum + pair.token * args.hidden_size + j;
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
    for (int64_t j = begin; j < end; j += kRows) Format::store_output(buffers.sum + t * args.hidden_size + j, out + j);
  }
}

template <typename Format>
int64_t packed_x_row_bytes(const FusedExpertsArgs& args) {
  return Format::kPacks ? aligned(args.hidden_size) * Format::kActivationBytes : 0;
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
  return aligned(args.intermediate_size) * Format::kActivationBytes;
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
