// Attention of one query per sequence over a paged KV cache, which is read where it lies.
#pragma once

#include <cstdint>

#include "moeopt/fields.h"
#include "moeopt/fused_experts.h"

namespace moeopt {

// Strides count elements. Query head h reads key/value head h / (num_heads / num_kv_heads).
struct PagedAttentionArgs {
  int64_t num_sequences, num_heads, num_kv_heads, head_size;
  int64_t num_blocks, block_size;
  DType dtype;         // of q, keys, values and out
  const void* q;       // [sequences, heads, head_size]
  const void* keys;    // contiguous [blocks, block_size, kv_heads, head_size]
  const void* values;  // the same
  void* out;           // [sequences, heads, head_size]
  int64_t q_stride, q_head_stride, out_stride, out_head_stride;
  const int32_t* block_tables;  // [sequences, table_width]
  int64_t table_width, table_stride;
  const int64_t* context_lengths;  // [sequences]: keys that a query attends to; 0: its output is 0
  float scale;                     // of the scores

  MOEOPT_FIELDS(num_sequences, num_heads, num_kv_heads, head_size, num_blocks, block_size, dtype, q, keys, values, out,
                q_stride, q_head_stride, out_stride, out_head_stride, block_tables, table_width, table_stride,
                context_lengths, scale)
};

// An entry that cannot be: a block outside the cache, or with `length` a context longer than its row of the table.
struct PageError {
  bool length;
  int64_t sequence, got, limit;
};

// False, with `error` filled and nothing written: an entry is wrong. Runs on the OpenMP threads of the caller; the bits
// do not depend on their number. Throws std::bad_alloc.
bool paged_attention_cpu(const PagedAttentionArgs& args, Isa isa, PageError* error);

}  // namespace moeopt
