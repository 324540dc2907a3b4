// The ExpertKernels of one instruction set and one pair of dtypes.
//
//   x [token, H] --+-- rows of gate --> gate [n, rows] --+
//                  +-- rows of up   --> up   [n, rows] --+-- SwiGLU --> h [pair, as many columns]
//
//   h [pair, I] ------ rows of w2 --> y [n, rows] -- + bias, x router weight
//                                     sum [token, as many columns] += (FP32)
//
// Few tokens of an expert, at most one register tile, take all rows of a task at once (dot_streams.h: memory is the
// limit). More tokens take 16 rows at a time, n = kChunkTokens tokens at a time (dot_rows.h: arithmetic is the limit).
// All buffers fit the L1 and L2 caches of one core. Decoding FP8 is exact. Internal linkage: see number_formats.h.
#pragma once

#include "../number_formats.h"
#include "activation.h"
#include "dot_rows.h"
#include "dot_streams.h"

namespace moeopt {
namespace {

// Rows that start at different offsets from a power of two do not compete for the same lines of a cache.
constexpr int64_t kRowPadBytes = 64;

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// What a row of activations takes: whole steps, as some formats order the columns within one.
template <typename Format>
int64_t activation_row_bytes(int64_t columns) {
  constexpr int64_t kColumns = Format::kStep > 64 ? Format::kStep : 64;
  return (columns + kColumns - 1) / kColumns * kColumns * Format::kActivationBytes + kRowPadBytes;
}

// A thread's scratch memory.
template <typename Format>
struct Scratch {
  using Decoded = typename Format::Decoded;

  DotScratch<Format> dot;
  float* first;   // [kChunkTokens, kRows], or [Format::kMaxTokens, kMaxTaskRows]
  float* second;  // the same

  static int64_t state_bytes() {
    return kChunkTokens * kWideRows * static_cast<int64_t>(sizeof(typename Decoded::Vec));
  }
  static_assert(Format::kMaxTokens * kMaxTaskRows <= kChunkTokens * kRows, "few tokens fill no more");
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

// Tokens of the next chunk of `left` tokens: chunks of about the same size.
inline int64_t chunk_of(int64_t left) {
  const int64_t chunks = (left + kChunkTokens - 1) / kChunkTokens;
  return (left + chunks - 1) / chunks;
}

// FP32 dot products of some tokens with some rows: token t, row n at values[t * stride + n].
struct Sums {
  const float* values;
  int64_t stride;
};

// Where gate and up lie in w13: their row i is gate(i) and up(i), the next ones are `step` further.
struct GateUpRows {
  int64_t step, up_first;

  explicit GateUpRows(const FusedExpertsArgs& args) {
    const bool alternating = args.activation == Activation::kSwigluOai;
    step = alternating ? 2 : 1;
    up_first = alternating ? 1 : args.intermediate_size;
  }
  int64_t gate(int64_t i) const { return step * i; }
  int64_t up(int64_t i) const { return up_first + step * i; }
};

// h[p, i:i+16) of `tokens` pairs from first_pair on, from their dot products with rows i.. of gate and up.
template <typename Format>
void store_activated(const FusedExpertsArgs& args, const LayerBuffers& buffers, const WeightMatrix<Format>& w13,
                     int64_t i, int64_t first_pair, int64_t tokens, Sums gate_sums, Sums up_sums) {
  using Simd = typename Format::Simd;
  const GateUpRows at_row(args);
  float gate_factor[kRows], gate_offset[kRows], up_factor[kRows], up_offset[kRows];
  w13.finish(at_row.gate(i), at_row.step, gate_factor, gate_offset);
  w13.finish(at_row.up(i), at_row.step, up_factor, up_offset);
  for (int64_t t = 0; t < tokens; ++t) {
    alignas(64) float values[kRows];
    for (int at = 0; at < kRows; at += Simd::kLanes) {
      const auto gate = Simd::fmadd(Simd::load(gate_sums.values + t * gate_sums.stride + at),
                                    Simd::load(gate_factor + at), Simd::load(gate_offset + at));
      const auto up = Simd::fmadd(Simd::load(up_sums.values + t * up_sums.stride + at), Simd::load(up_factor + at),
                                  Simd::load(up_offset + at));
      Simd::store(values + at, activate<Simd>(args.activation, gate, up));
    }
    Format::store_activations(values, buffers.h + (first_pair + t - buffers.h_first_pair) * buffers.h_row_bytes, i);
  }
}

// sum[token, j:j+16) += weight * y of `tokens` pairs from first_pair on, from their dot products with rows j.. of w2.
template <typename Format>
void add_weighted(const LayerBuffers& buffers, const WeightMatrix<Format>& w2, int64_t j, int64_t first_pair,
                  int64_t tokens, Sums sums) {
  using Simd = typename Format::Simd;
  float factor[kRows], offset[kRows];
  w2.finish(j, 1, factor, offset);
  for (int64_t t = 0; t < tokens; ++t) {
    const Pair pair = buffers.pairs[first_pair + t];
    float* sum = buffers.sum + pair.token * buffers.sum_stride + j;
    for (int at = 0; at < kRows; at += Simd::kLanes) {
      const auto y =
          Simd::fmadd(Simd::load(sums.values + t * sums.stride + at), Simd::load(factor + at), Simd::load(offset + at));
      Simd::store(sum + at, Simd::fmadd(Simd::set1(pair.weight), y, Simd::load(sum + at)));
    }
  }
}

// The activations of `tokens` pairs from first_pair on, and their rows of the intermediate.
inline void x_rows(const LayerBuffers& buffers, int64_t first_pair, int64_t tokens, const char** rows) {
  for (int64_t t = 0; t < tokens; ++t) rows[t] = buffers.x + buffers.pairs[first_pair + t].token * buffers.x_row_bytes;
}
inline void h_rows(const LayerBuffers& buffers, int64_t first_pair, int64_t tokens, const char** rows) {
  const char* first = buffers.h + (first_pair - buffers.h_first_pair) * buffers.h_row_bytes;
  for (int64_t t = 0; t < tokens; ++t) rows[t] = first + t * buffers.h_row_bytes;
}

template <typename Format>
void gate_up_few(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, int64_t begin,
                 int64_t end, const Scratch<Format>& scratch) {
  const WeightMatrix<Format> w13 = WeightMatrix<Format>::w13(args, run.expert);
  const GateUpRows at_row(args);
  const int64_t tokens = run.end - run.begin, rows = end - begin;
  const char* x[Format::kMaxTokens];
  x_rows(buffers, run.begin, tokens, x);
  const WeightRows<Format> up = w13.unit(at_row.up(begin), at_row.step);
  dot_streams<Format>(x, tokens, w13, at_row.gate(begin), at_row.step, rows, &up, scratch.dot.state, scratch.first,
                      rows);
  dot_streams<Format>(x, tokens, w13, at_row.up(begin), at_row.step, rows, nullptr, scratch.dot.state, scratch.second,
                      rows);
  for (int64_t i = begin; i < end; i += kRows) {
    const Sums gate{scratch.first + i - begin, rows}, up{scratch.second + i - begin, rows};
    store_activated<Format>(args, buffers, w13, i, run.begin, tokens, gate, up);
  }
}

template <typename Format>
void gate_up_many(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, int64_t begin,
                  int64_t end, const Scratch<Format>& scratch) {
  const WeightMatrix<Format> w13 = WeightMatrix<Format>::w13(args, run.expert);
  const GateUpRows at_row(args);
  for (int64_t i = begin; i < end; i += kRows) {
    const WeightRows<Format> gate = w13.unit(at_row.gate(i), at_row.step), up = w13.unit(at_row.up(i), at_row.step);
    const typename Format::Weight* after = i + kRows < end ? w13.row(at_row.gate(i + kRows)) : nullptr;
    for (int64_t p = run.begin, tokens; p < run.end; p += tokens) {
      tokens = chunk_of(run.end - p);
      const bool first_chunk = p == run.begin;  // what it fetches ahead is in the cache for the others
      const char* x[kChunkTokens];
      x_rows(buffers, p, tokens, x);
      dot_rows<Format>(x, tokens, gate, first_chunk ? up.w : nullptr, scratch.dot, scratch.first);
      dot_rows<Format>(x, tokens, up, first_chunk ? after : nullptr, scratch.dot, scratch.second);
      store_activated<Format>(args, buffers, w13, i, p, tokens, {scratch.first, kRows}, {scratch.second, kRows});
    }
  }
}

template <typename Format>
void gate_up(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, int64_t begin,
             int64_t end, char* memory) {
  const Scratch<Format> scratch(args, memory);
  if (run.end - run.begin <= Format::kMaxTokens) {
    gate_up_few<Format>(args, buffers, run, begin, end, scratch);
  } else {
    gate_up_many<Format>(args, buffers, run, begin, end, scratch);
  }
}

template <typename Format>
void down_few(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, const ExpertRun* next,
              int64_t begin, int64_t end, const Scratch<Format>& scratch) {
  const WeightMatrix<Format> w2 = WeightMatrix<Format>::w2(args, run.expert);
  const int64_t tokens = run.end - run.begin, rows = end - begin;
  const char* h[Format::kMaxTokens];
  h_rows(buffers, run.begin, tokens, h);
  WeightRows<Format> of_next{};
  if (next) of_next = WeightMatrix<Format>::w2(args, next->expert).unit(begin, 1);
  dot_streams<Format>(h, tokens, w2, begin, 1, rows, next ? &of_next : nullptr, scratch.dot.state, scratch.first, rows);
  for (int64_t j = begin; j < end; j += kRows) {
    add_weighted<Format>(buffers, w2, j, run.begin, tokens, {scratch.first + j - begin, rows});
  }
}

template <typename Format>
void down_many(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, const ExpertRun* next,
               int64_t begin, int64_t end, const Scratch<Format>& scratch) {
  const WeightMatrix<Format> w2 = WeightMatrix<Format>::w2(args, run.expert);
  const typename Format::Weight* first_of_next = nullptr;
  if (next) first_of_next = WeightMatrix<Format>::w2(args, next->expert).row(begin);
  for (int64_t j = begin; j < end; j += kRows) {
    const typename Format::Weight* after = j + kRows < end ? w2.row(j + kRows) : first_of_next;
    for (int64_t p = run.begin, tokens; p < run.end; p += tokens) {
      tokens = chunk_of(run.end - p);
      const char* h[kChunkTokens];
      h_rows(buffers, p, tokens, h);
      dot_rows<Format>(h, tokens, w2.unit(j, 1), p == run.begin ? after : nullptr, scratch.dot, scratch.first);
      add_weighted<Format>(buffers, w2, j, p, tokens, {scratch.first, kRows});
    }
  }
}

template <typename Format>
void down(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, const ExpertRun* next,
          int64_t begin, int64_t end, char* memory) {
  const Scratch<Format> scratch(args, memory);
  if (run.end - run.begin <= Format::kMaxTokens) {
    down_few<Format>(args, buffers, run, next, begin, end, scratch);
  } else {
    down_many<Format>(args, buffers, run, next, begin, end, scratch);
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
  return Format::kPacks ? activation_row_bytes<Format>(args.hidden_size) : 0;
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
  return activation_row_bytes<Format>(args.intermediate_size);
}

template <typename Format>
int64_t scratch_bytes(const FusedExpertsArgs& args) {
  return Scratch<Format>::bytes(args);
}

// `Products`: a Format with the same weights and the same activations; the dtype of x and out may be another. Formats
// that differ in nothing else name the same one, so that their loops are compiled once.
template <typename Format, typename Products = Format>
constexpr ExpertKernels kExperts = {
    packed_x_row_bytes<Format>, pack_x_row<Format>, h_row_bytes<Format>, scratch_bytes<Format>,
    gate_up<Products>,          down<Products>,     store<Format>};

}  // namespace
}  // namespace moeopt
