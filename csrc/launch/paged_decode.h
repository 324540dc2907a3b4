// The attention of few requests' new tokens to the paged KV cache: checks and geometry. Plain arithmetic, no GPU.
#pragma once

#include "launch/geometry.h"
#include "moeopt/paged_decode.cuh"

namespace moeopt {

// Multiprocessors have 228 KiB of shared memory, of which 1 KiB per block is CUDA's (Programming Guide, 9.0).
static_assert(kDecodeBlocks * (DecodeShape<128>::kSharedBytes + kAlignmentSlack + 1024) <= 228 * 1024,
              "more shared memory than a multiprocessor has");

inline int64_t decode_address(const void* pointer) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer));
}

inline PagedDecodeLaunch paged_decode_launch(const PagedDecodeArgs& args, int multiprocessors) {
  expect_at_least("paged_decode: T", args.num_tokens, 1);
  expect_at_most("paged_decode: T", args.num_tokens, kDecodeTokens);
  if (args.head_size != 64 && args.head_size != 128) refuse("paged_decode: d", args.head_size, "64 or 128");
  expect_at_least("paged_decode: K", args.num_kv_heads, 1);
  expect_at_most("paged_decode: K", args.num_kv_heads, kMaxExperts);  // so many words count arrivals per token
  expect_multiple("paged_decode: H", args.num_heads, args.num_kv_heads);
  expect_at_least("paged_decode: H / K", args.num_heads / args.num_kv_heads, 1);
  expect_at_most("paged_decode: H / K", args.num_heads / args.num_kv_heads, kDecodeHeads);
  expect_at_least("paged_decode: keys of a block", args.block_size, kDecodeKeys);
  expect_multiple("paged_decode: keys of a block", args.block_size, kDecodeKeys);
  expect_at_least("paged_decode: multiprocessors", multiprocessors, 1);
  // What is loaded or stored at a time: 4 bytes of q, 16 of the cache, 8 of the output.
  expect_multiple("paged_decode: elements between tokens of q", args.q_stride, 2);
  expect_multiple("paged_decode: elements between heads of q", args.q_head_stride, 2);
  expect_multiple("paged_decode: address of q", decode_address(args.q), 4);
  expect_multiple("paged_decode: elements between blocks of the cache", args.block_stride, 8);
  expect_multiple("paged_decode: elements between heads of the cache", args.head_stride, 8);
  expect_multiple("paged_decode: elements between keys of the cache", args.key_stride, 8);
  expect_multiple("paged_decode: address of the cache", decode_address(args.cache), 16);
  if (args.new_keys != nullptr) {
    expect_multiple("paged_decode: elements between tokens of new_keys", args.new_key_stride, 8);
    expect_multiple("paged_decode: elements between heads of new_keys", args.new_key_head_stride, 8);
    expect_multiple("paged_decode: address of new_keys", decode_address(args.new_keys), 16);
    expect_multiple("paged_decode: elements between tokens of new_values", args.new_value_stride, 8);
    expect_multiple("paged_decode: elements between heads of new_values", args.new_value_head_stride, 8);
    expect_multiple("paged_decode: address of new_values", decode_address(args.new_values), 16);
  }
  expect_multiple("paged_decode: elements between tokens of the output", args.out_stride, 4);
  expect_multiple("paged_decode: elements between heads of the output", args.out_head_stride, 4);
  expect_multiple("paged_decode: address of the output", decode_address(args.out), 8);
  const int64_t of_head = std::max(args.num_tokens, kDecodeBlocks * multiprocessors / args.num_kv_heads);
  PagedDecodeLaunch launch{};
  launch.blocks = static_cast<int32_t>(of_head * args.num_kv_heads);
  launch.threads = kDecodeThreads;
  launch.shared_bytes =
      (args.head_size == 64 ? DecodeShape<64>::kSharedBytes : DecodeShape<128>::kSharedBytes) + kAlignmentSlack;
  // Sums, and behind them maximum and sum of weights, of each query head of each block.
  launch.workspace_bytes = launch.blocks * (args.num_heads / args.num_kv_heads) * (args.head_size + 2) * 4;
  return launch;
}

}  // namespace moeopt
