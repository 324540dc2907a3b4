// The product of few tokens with a weight matrix: checks and geometry. Plain arithmetic, no GPU.
#pragma once

#include "launch/geometry.h"
#include "moeopt/skinny_gemm.cuh"

namespace moeopt {

static_assert(kSkinnySharedBytes + kAlignmentSlack <= kSharedLimit, "more shared memory than a block may have");

inline SkinnyGemmLaunch skinny_gemm_launch(const SkinnyGemmArgs& args, int multiprocessors) {
  expect_at_least("skinny_gemm: T", args.num_tokens, 1);
  expect_at_most("skinny_gemm: T", args.num_tokens, kSkinnyTokens);
  expect_at_least("skinny_gemm: N", args.num_rows, 1);
  expect_at_most("skinny_gemm: N", args.num_rows, int64_t{1} << 24);
  expect_at_least("skinny_gemm: K", args.depth, 32);
  expect_at_most("skinny_gemm: K", args.depth, int64_t{1} << 24);
  expect_multiple("skinny_gemm: K", args.depth, 32);
  expect_at_least("skinny_gemm: multiprocessors", multiprocessors, 1);
  // 16 bytes are loaded at a time.
  expect_multiple("skinny_gemm: elements between tokens of x", args.x_stride, 8);
  expect_multiple("skinny_gemm: address of x", static_cast<int64_t>(reinterpret_cast<uintptr_t>(args.x)), 16);
  expect_multiple("skinny_gemm: address of w", static_cast<int64_t>(reinterpret_cast<uintptr_t>(args.w)), 16);
  SkinnyGemmLaunch launch{};
  launch.blocks = static_cast<int32_t>(std::min<int64_t>(multiprocessors, args.num_rows));
  launch.threads = 32 * kSkinnyWarps;
  launch.shared_bytes = kSkinnySharedBytes + kAlignmentSlack;
  return launch;
}

}  // namespace moeopt
