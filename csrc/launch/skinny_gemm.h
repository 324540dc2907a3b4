// The product of few tokens with a weight matrix: checks and geometry. Plain arithmetic, no GPU.
#pragma once

#include "launch/geometry.h"
#include "moeopt/skinny_gemm.cuh"

namespace moeopt {

// Calls `use` with warps, stages and token tiles of the kernel that is compiled for the variant.
template <typename Use>
void with_skinny_shape(const SkinnyVariant& variant, int token_tiles, Use use) {
  const auto try_shape = [&](auto warps, auto stages) {
    if (variant.warps != warps || variant.stages != stages) return false;
    if (token_tiles == 1) {
      use(warps, stages, std::integral_constant<int, 1>());
    } else {
      use(warps, stages, std::integral_constant<int, 2>());
    }
    return true;
  };
  const std::integral_constant<int, 2> two;
  const std::integral_constant<int, 3> three;
  const std::integral_constant<int, 8> eight;
  const std::integral_constant<int, 16> sixteen;
  if (try_shape(eight, two) || try_shape(eight, three) || try_shape(sixteen, two)) return;
  throw std::invalid_argument("skinny_gemm: variant: got " + std::to_string(variant.warps) + " warps and " +
                              std::to_string(variant.stages) + " stages, expected one that is compiled");
}

inline SkinnyGemmLaunch skinny_gemm_launch(const SkinnyGemmArgs& args, const SkinnyVariant& variant,
                                           int multiprocessors) {
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
  expect_at_least("skinny_gemm: bytes between what is prefetched", args.prefetch_apart, 32);
  SkinnyGemmLaunch launch{};
  launch.token_tiles = args.num_tokens > 8 ? 2 : 1;
  with_skinny_shape(variant, launch.token_tiles, [&](auto warps, auto stages, auto tiles) {
    using Shape = SkinnyShape<decltype(warps)::value, decltype(stages)::value, decltype(tiles)::value>;
    static_assert(Shape::kSharedBytes + kAlignmentSlack <= kSharedLimit, "more shared memory than a block may have");
    launch.blocks = static_cast<int32_t>(std::min<int64_t>(multiprocessors, args.num_rows));
    launch.threads = 32 * variant.warps;
    launch.shared_bytes = Shape::kSharedBytes + kAlignmentSlack;
  });
  return launch;
}

}  // namespace moeopt
