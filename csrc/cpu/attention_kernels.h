// The interface of one instruction set: the arithmetic of attention over a span of keys. paged_attention.cpp decides
// which thread computes which span. No standard containers here: see expert_kernels.h.
#pragma once

#include <cstdint>

#include "paged_attention.h"

namespace moeopt {

// Keys [begin, end) of a sequence, for the query heads of some key/value heads.
struct KeySpan {
  int64_t sequence, kv_head, num_kv_heads, begin, end;
};

struct AttentionKernels {
  int64_t lanes;  // FP32 numbers of a register
  // For each of the query heads, `partial_stride(args)` floats: the largest score, the sum of
  // exp(score - largest), and the values' sum with those weights [head_size]. `next`: what this thread probably
  // computes afterwards, or null; its first keys are fetched ahead.
  void (*attend)(const PagedAttentionArgs& args, const KeySpan& span, const KeySpan* next, float* scratch,
                 float* partials);
};

constexpr int64_t kTileKeys = 64;  // their scores stay in the L1 cache

namespace {
inline int64_t partial_stride(const PagedAttentionArgs& args) { return args.head_size + 2; }
}  // namespace

// Null for dtypes outside the contract.
const AttentionKernels* generic_attention(DType dtype);
const AttentionKernels* avx2_attention(DType dtype);
const AttentionKernels* avx512_attention(DType dtype);

}  // namespace moeopt
