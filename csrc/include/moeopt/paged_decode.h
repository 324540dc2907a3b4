// One call of the attention of few requests' new tokens to the paged KV cache (paged_decode.cuh), which Python fills by
// field names. Strides are in elements.
#pragma once

#include <cstdint>

#include "moeopt/fields.h"

namespace moeopt {

struct PagedDecodeArgs {
  const uint16_t* q;  // BF16 [T, H, d], rows contiguous
  int64_t q_stride, q_head_stride;
  uint16_t* cache;  // BF16 [blocks, K, block size, 2 d]: a key with its value behind it
  int64_t block_stride, head_stride, key_stride;
  const int* block_table;  // [T, pages]
  int64_t table_stride;
  const int* lengths;        // [T]: keys of each request, the new one included; 0: no request
  const uint16_t* new_keys;  // BF16 [T, K, d], rows contiguous: the last key of each request, stored here in the cache;
                             // null: the cache has it
  int64_t new_key_stride, new_key_head_stride;
  const uint16_t* new_values;
  int64_t new_value_stride, new_value_head_stride;
  const int64_t* slots;  // [T]: block * block size + place of the new key; negative: it is not stored
  uint16_t* out;         // BF16 [T, H, d], rows contiguous
  int64_t out_stride, out_head_stride;
  float* workspace;  // of one call at a time
  int* arrived;      // [K, T], zero between launches; of one stream
  int64_t num_tokens, num_heads, num_kv_heads, head_size, block_size;
  float scale;

  MOEOPT_FIELDS(q, q_stride, q_head_stride, cache, block_stride, head_stride, key_stride, block_table, table_stride,
                lengths, new_keys, new_key_stride, new_key_head_stride, new_values, new_value_stride,
                new_value_head_stride, slots, out, out_stride, out_head_stride, workspace, arrived, num_tokens,
                num_heads, num_kv_heads, head_size, block_size, scale)
};

struct PagedDecodeLaunch {
  int32_t blocks, threads, shared_bytes;
  int64_t workspace_bytes;

  MOEOPT_FIELDS(blocks, threads, shared_bytes, workspace_bytes)
};

}  // namespace moeopt
