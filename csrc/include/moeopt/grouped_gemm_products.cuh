// What the math warpgroups do with one stage of the grouped GEMM (grouped_gemm.cuh): products, and FP8's scales.
//
//   BF16           sums += w x
//   FP8 weights    part = bf16(w) x;  sums += factor part
//   FP8 x FP8, up  part = w x;        sums += factor part, at the end sums *= scale of the token
//              down part = w h;       sums += factor scale part: the scale of h's token and 128 of K
//
// factor: of 128 x 128 weights, or 1.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/grouped_gemm_shape.cuh"

namespace moeopt {

// Where the scale of column n lies: the four that a thread has in 16 columns, 2t, 2t + 1, 2t + 8, 2t + 9, side by side.
MOEOPT_DEVICE int token_scale_place(int n) { return (n & ~15) | ((n & 6) << 1) | ((n & 8) >> 2) | (n & 1); }

template <int kRegisters>
MOEOPT_DEVICE void touch_all(float (&values)[kRegisters]) {
  MOEOPT_UNROLL
  for (int r = 0; r < kRegisters; ++r) wgmma_touch(values[r]);
}

// One stage of BF16: 4 steps of K = 16, both operands from shared memory, one group in flight behind.
template <int kColumns>
MOEOPT_DEVICE void multiply_bf16(const unsigned char* stage, int warpgroup, bool first, float (&sum0)[kColumns / 2],
                                 float (&sum1)[kColumns / 2]) {
  const uint64_t a0 = swizzled_descriptor(stage + (2 * warpgroup) * kBoxBytes);
  const uint64_t a1 = swizzled_descriptor(stage + (2 * warpgroup + 1) * kBoxBytes);
  const uint64_t b = swizzled_descriptor(stage + 4 * kBoxBytes);
  wgmma_fence();
  MOEOPT_UNROLL
  for (int k = 0; k < 4; ++k) {
    const int keep = !first || k > 0;
    wgmma_bf16(sum0, advance_descriptor(a0, 32 * k), advance_descriptor(b, 32 * k), keep);
    wgmma_bf16(sum1, advance_descriptor(a1, 32 * k), advance_descriptor(b, 32 * k), keep);
  }
  wgmma_commit();
}

// E4M3 weights of rows g and g + 8 of this warp, K = 16 k + 4 t ..., as BF16 operand registers.
MOEOPT_DEVICE void load_fp8_rows(const unsigned char* box, int k, uint32_t (&registers)[4]) {
  const int lane = thread_index() % 32, row = thread_index() / 32 % 4 * 16 + lane / 4;
  const unsigned char* source = box + row * 128 + ((k ^ (row & 7)) << 4) + lane % 4 * 4;
  const uint32_t low = *reinterpret_cast<const uint32_t*>(source);
  const uint32_t high = *reinterpret_cast<const uint32_t*>(source + 8 * 128);  // row + 8: the same swizzle
  registers[0] = bf16x2_from_e4m3x2(low);
  registers[1] = bf16x2_from_e4m3x2(high);
  registers[2] = bf16x2_from_e4m3x2(low >> 16);
  registers[3] = bf16x2_from_e4m3x2(high >> 16);
}

// One stage of FP8 weights and BF16 tokens, of which `second_half` is the offset of K = 64 and on. Two register sets:
// one is converted while the other is multiplied.
template <int kColumns>
MOEOPT_DEVICE void multiply_fp8_weights(const unsigned char* stage, int warpgroup, int second_half,
                                        float (&part0)[kColumns / 2], float (&part1)[kColumns / 2]) {
  const uint64_t b = swizzled_descriptor(stage + 4 * kBoxBytes);
  uint32_t a0[2][4], a1[2][4];
  MOEOPT_UNROLL
  for (int k = 0; k < 8; ++k) {
    load_fp8_rows(stage + (2 * warpgroup) * kBoxBytes, k, a0[k % 2]);
    load_fp8_rows(stage + (2 * warpgroup + 1) * kBoxBytes, k, a1[k % 2]);
    const uint64_t tokens = advance_descriptor(b, k / 4 * second_half + k % 4 * 32);
    wgmma_fence();
    wgmma_bf16(part0, a0[k % 2], tokens, k > 0);
    wgmma_bf16(part1, a1[k % 2], tokens, k > 0);
    wgmma_commit();
    wgmma_wait<1>();  // the group before is done: its registers may be written again
  }
  wgmma_wait<0>();
}

// One stage of FP8 x FP8, one operand, columns from kFirst on: 4 steps of K = 32. Not waited for.
template <int kColumns, int kFirst = 0>
MOEOPT_DEVICE void multiply_fp8(const unsigned char* stage, int box, float (&part)[kColumns / 2]) {
  static_assert(kFirst % 8 == 0, "the swizzle's period");
  const uint64_t a = swizzled_descriptor(stage + box * kBoxBytes);
  const uint64_t b = swizzled_descriptor(stage + 4 * kBoxBytes + kFirst * 128);
  wgmma_fence();
  MOEOPT_UNROLL
  for (int k = 0; k < 4; ++k) wgmma_e4m3(part, advance_descriptor(a, 32 * k), advance_descriptor(b, 32 * k), k > 0);
  wgmma_commit();
}

// The scales of this thread's columns of the 16 columns from 16 q on.
MOEOPT_DEVICE void load_token_scales(float (&scales)[4], const float* token_scale, int q) {
  const Vec4 v = *reinterpret_cast<const Vec4*>(token_scale + 16 * q + thread_index() % 4 * 4);
  scales[0] = float_from_bits(v.x);
  scales[1] = float_from_bits(v.y);
  scales[2] = float_from_bits(v.z);
  scales[3] = float_from_bits(v.w);
}

// sum += factor * part, in the columns from kFirst on, of which `part` has as many as it has room for. `factor`: of the
// warp's 16 rows. kTokenScale: times that of each column, too.
template <bool kTokenScale, int kFirst, int kSums, int kParts>
MOEOPT_DEVICE void add_scaled(float (&sum)[kSums], float (&part)[kParts], float factor, const float* token_scale) {
  touch_all(part);
  float of_tokens[4];
  MOEOPT_UNROLL
  for (int j = 0; j < kParts / 4; ++j) {
    constexpr int kEight = kFirst / 8;
    float first = factor, second = factor;
    if constexpr (kTokenScale) {
      if (j == 0 || (kEight + j) % 2 == 0) load_token_scales(of_tokens, token_scale, (kEight + j) / 2);
      first *= of_tokens[(kEight + j) % 2 * 2];
      second *= of_tokens[(kEight + j) % 2 * 2 + 1];
    }
    const int to = kFirst / 2 + 4 * j;
    sum[to] += first * part[4 * j];
    sum[to + 1] += second * part[4 * j + 1];
    sum[to + 2] += first * part[4 * j + 2];
    sum[to + 3] += second * part[4 * j + 3];
  }
}

// sum *= the scale of each column.
template <int kSums>
MOEOPT_DEVICE void scale_columns(float (&sum)[kSums], const float* token_scale) {
  float of_tokens[4];
  MOEOPT_UNROLL
  for (int r = 0; r < kSums; ++r) {
    if (r % 8 == 0) load_token_scales(of_tokens, token_scale, r / 8);
    sum[r] *= of_tokens[r % 8 / 4 * 2 + r % 2];
  }
}

// One stage of FP8 x FP8, one operand, added: in two halves where partial sums of all columns do not fit. `meanwhile`
// is called while the last are made.
template <int kColumns, bool kTokenScale, typename Meanwhile>
MOEOPT_DEVICE void multiply_add_fp8(const unsigned char* stage, int box, float (&sum)[kColumns / 2], float factor,
                                    const float* token_scale, const Meanwhile& meanwhile) {
  constexpr int kPart = kColumns > 128 ? kColumns / 2 : kColumns, kLast = kColumns - kPart;
  float part[kPart / 2];
  if constexpr (kLast > 0) {
    multiply_fp8<kPart>(stage, box, part);
    wgmma_wait<0>();
    add_scaled<kTokenScale, 0>(sum, part, factor, token_scale);
  }
  multiply_fp8<kPart, kLast>(stage, box, part);
  meanwhile();
  wgmma_wait<0>();
  add_scaled<kTokenScale, kLast>(sum, part, factor, token_scale);
}

}  // namespace moeopt
