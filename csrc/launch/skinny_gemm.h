// The product of few tokens with a weight matrix: checks and geometry. Plain arithmetic, no GPU.
#pragma once

#include "launch/geometry.h"
#include "moeopt/skinny_gemm.cuh"

namespace moeopt {

// Calls `use` with the SkinnyShape that is compiled for the variant and the number of token tiles.
template <typename Use>
void with_skinny_shape(const SkinnyVariant& variant, int token_tiles, Use use) {
  const auto with_tokens = [&](auto buffer, auto warps) {
    constexpr SkinnyBuffer kBuffer = decltype(buffer)::value;
    constexpr int kWarps = decltype(warps)::value;
    if (variant.buffer != kBuffer || variant.warps != kWarps) return false;
    if (token_tiles == 1) {
      use(buffer, warps, std::integral_constant<int, 1>());
    } else {
      use(buffer, warps, std::integral_constant<int, 2>());
    }
    return true;
  };
  const std::integral_constant<SkinnyBuffer, SkinnyBuffer::kRegisters> registers;
  const std::integral_constant<SkinnyBuffer, SkinnyBuffer::kShared> shared;
  const std::integral_constant<SkinnyBuffer, SkinnyBuffer::kBulk> bulk;
  const std::integral_constant<int, 4> four;
  const std::integral_constant<int, 8> eight;
  const std::integral_constant<int, 16> sixteen;
  if (with_tokens(registers, eight) || with_tokens(shared, eight) || with_tokens(shared, sixteen) ||
      with_tokens(bulk, four) || with_tokens(bulk, eight)) {
    return;
  }
  throw std::invalid_argument("skinny_gemm: variant: got buffer " + std::to_string(static_cast<int>(variant.buffer)) +
                              " and " + std::to_string(variant.warps) + " warps, expected one that is compiled");
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
  expect_multiple("skinny_gemm: address to prefetch", static_cast<int64_t>(reinterpret_cast<uintptr_t>(args.prefetch)),
                  16);
  expect_multiple("skinny_gemm: bytes to prefetch", args.prefetch_bytes, 16);
  SkinnyGemmLaunch launch{};
  launch.token_tiles = args.num_tokens > 8 ? 2 : 1;
  with_skinny_shape(variant, launch.token_tiles, [&](auto buffer, auto warps, auto tiles) {
    using Shape = SkinnyShape<decltype(buffer)::value, decltype(warps)::value, decltype(tiles)::value>;
    static_assert(Shape::kSharedBytes + kAlignmentSlack <= kSharedLimit, "more shared memory than a block may have");
    launch.blocks = static_cast<int32_t>(std::min<int64_t>(multiprocessors * Shape::kBlocks, args.num_rows));
    launch.threads = 32 * variant.warps;
    launch.shared_bytes = Shape::kSharedBytes + kAlignmentSlack;
  });
  return launch;
}

}  // namespace moeopt
