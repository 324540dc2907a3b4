// The interface of one instruction set: the arithmetic of a tile of rows of one expert.
//
// fused_experts.cpp decides which thread computes which tile. No standard containers here: their inline functions,
// compiled for AVX-512, could be linked into other paths.
#pragma once

#include <cstdint>

#include "moeopt/fused_experts.h"

namespace moeopt {

// One (token, slot) of the routing that names an expert of this rank.
struct Pair {
  int32_t token;
  float weight;
};

// Pairs [begin, end) of one expert. A long run is cut into several so that its intermediate stays in cache.
struct ExpertRun {
  int64_t expert;
  int64_t begin, end;
};

// The buffers a tile reads and writes.
struct LayerBuffers {
  const char* x;  // activations as the kernel reads them: row t at x + t * x_row_bytes
  int64_t x_row_bytes;
  char* h;  // SwiGLU results: pair p at h + (p - h_first_pair) * h_row_bytes
  int64_t h_row_bytes;
  int64_t h_first_pair;
  float* sum;  // FP32 sums: token t at sum + t * sum_stride
  int64_t sum_stride;
  const Pair* pairs;
};

// Most rows of a tile: their dot products with a few tokens fit the L1 cache.
constexpr int64_t kMaxTaskRows = 256;

struct ExpertKernels {
  // Bytes of one activation row in the kernel's own form; 0 where it reads x in place.
  int64_t (*packed_x_row_bytes)(const FusedExpertsArgs& args);
  // Writes row `token` of x into `row` in that form. Never called where packed_x_row_bytes is 0.
  void (*pack_x_row)(const FusedExpertsArgs& args, int64_t token, char* row);
  // Bytes of one row of the intermediate.
  int64_t (*h_row_bytes)(const FusedExpertsArgs& args);
  // Bytes of scratch memory a thread needs, 64-byte aligned.
  int64_t (*scratch_bytes)(const FusedExpertsArgs& args);

  // begin and end below are multiples of kSizeMultiple, at most kMaxTaskRows apart.
  // h[p, begin:end) = activation(x[p] @ gate.T, x[p] @ up.T) for the pairs of `run`.
  void (*gate_up)(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, int64_t begin,
                  int64_t end, char* scratch);
  // sum[token(p), begin:end) += weight(p) * (h[p] @ down.T + bias), for the pairs of `run` in order. `next`: the run
  // that the same columns are wanted of afterwards, or null; its weights may be fetched ahead.
  void (*down)(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, const ExpertRun* next,
               int64_t begin, int64_t end, char* scratch);
  // out[:, begin:end) = sum[:, begin:end), rounded once.
  void (*store)(const FusedExpertsArgs& args, const LayerBuffers& buffers, int64_t begin, int64_t end);
};

// The kernels of one instruction set for the dtypes of `args`; null for dtypes outside the contract.
const ExpertKernels* generic_kernels(const FusedExpertsArgs& args);
const ExpertKernels* avx2_kernels(const FusedExpertsArgs& args);
const ExpertKernels* avx512_kernels(const FusedExpertsArgs& args);
const ExpertKernels* avx512_bf16_kernels(const FusedExpertsArgs& args);
// For INT4 weights, see int4_experts.h.
const ExpertKernels* generic_int4_kernels(DType x_dtype);
const ExpertKernels* avx2_int4_kernels(DType x_dtype);
const ExpertKernels* avx512_int4_kernels(DType x_dtype);
const ExpertKernels* avx512_bf16_int4_kernels(DType x_dtype);
// Those of `isa`, which this machine has.
const ExpertKernels* kernels_for(const FusedExpertsArgs& args, Isa isa);

// fused_experts_cpu with these kernels.
bool run_experts(const FusedExpertsArgs& args, const ExpertKernels& kernels, RoutingError* error);

}  // namespace moeopt
