// The product of few tokens with a weight matrix: checks and geometry. Plain arithmetic, no GPU.
#pragma once

#include <type_traits>

#include "launch/geometry.h"
#include "moeopt/skinny_gemm.cuh"

namespace moeopt {

static_assert(kSkinnySharedBytes + kAlignmentSlack <= kSharedLimit, "more shared memory than a block may have");

// Calls `use` with the number of the weights' format as a type.
template <typename Use>
void with_skinny_weights(SkinnyWeights weights, Use use) {
  switch (weights) {
    case SkinnyWeights::kBf16: return use(std::integral_constant<SkinnyWeights, SkinnyWeights::kBf16>{});
    case SkinnyWeights::kE4M3Rows: return use(std::integral_constant<SkinnyWeights, SkinnyWeights::kE4M3Rows>{});
    case SkinnyWeights::kE4M3Blocks: return use(std::integral_constant<SkinnyWeights, SkinnyWeights::kE4M3Blocks>{});
  }
  refuse("skinny_gemm: weights", static_cast<int64_t>(weights), "0 to 2");
}

inline int64_t skinny_piece_columns(SkinnyWeights weights) {
  int64_t columns = 0;
  with_skinny_weights(weights, [&](auto format) { columns = kSkinnyPieceColumns<decltype(format)::value>; });
  return columns;
}

inline SkinnyGemmLaunch skinny_gemm_launch(const SkinnyGemmArgs& args, int multiprocessors) {
  expect_at_least("skinny_gemm: T", args.num_tokens, 1);
  expect_at_most("skinny_gemm: T", args.num_tokens, kSkinnyTokens);
  expect_at_least("skinny_gemm: N", args.num_rows, 1);
  expect_at_most("skinny_gemm: N", args.num_rows, int64_t{1} << 24);
  const int64_t piece = skinny_piece_columns(args.weights);
  expect_at_least("skinny_gemm: K", args.depth, piece);
  expect_at_most("skinny_gemm: K", args.depth, int64_t{1} << 24);
  expect_multiple("skinny_gemm: K", args.depth, piece);
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
