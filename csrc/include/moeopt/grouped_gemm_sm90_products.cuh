// Products and scales of one work tile of the grouped GEMM (grouped_gemm_sm90.cuh), by the math warpgroups.
//
//   BF16            sums += w x
//   FP8 weights     part = bf16(w) x;  sums += f part                                    f: of 128 x 128 weights, or 1
//   MXFP4 weights   sums += bf16(w) x; at the end sums *= 2^32                           bf16(w): scaled, x 2^-32
//   INT4 weights    sums += bf16(w) x                                                    bf16(w): scaled, rounded once
//   MXFP4 x FP8 up  sums += e4m3(w) x; at the end sums *= r s                            r: of the row, s: of the token
//              down sums = sums s' / s + e4m3(w) h; at the end sums *= r s               s', s: as in wide tiles below
//   FP8 x FP8, up to 64 columns
//              up   part = w x;        sums += f part, at the end sums *= s              s: of the token
//              down part = w h;        sums += f s part                                  s: of the token and 128 of K
//   FP8 x FP8, wider: the tensor cores add; before each 128 of K the sums are rescaled to its scales
//              up   sums = sums f' / f + w x, at the end sums *= f s                     f': of the 128 before
//              down sums = sums (f' s') / (f s) + w h, at the end sums *= f s
//
// The tensor cores keep about 14 bits of an FP8 sum, FP32 sums keep 24; with 4-bit operands the difference does not
// show (docs/kernels.md has the measured errors). Wide tiles have no registers for partial sums of both operands.
// Rescaling lets one operand be multiplied while the other is scaled, which saves up to a quarter of the time.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/grouped_gemm_sm90_shape.cuh"
#include "moeopt/mxfp4.cuh"

namespace moeopt {

// The stages of one work tile, for one math warpgroup.
template <GemmMode kMode, int kTokens, bool kUp>
struct TileStages {
  using Shape = GemmShape<kMode, kTokens>;
  static constexpr int kTokensInStage = kTokens;
  static constexpr float kLeastFactor = 0x1p-60f;

  GemmRing& ring;
  int num_steps, warpgroup;
  bool paired, has_factors;
  float factor0 = 1.0f, factor1 = 1.0f;  // weight scales of the open stage: this warp's rows of operand 0, 1

  MOEOPT_DEVICE TileStages(const GemmArgs& args, GemmRing& ring_, int warpgroup_)
      : ring(ring_), num_steps(ceil_div(args.depth, Shape::kDepth)), warpgroup(warpgroup_), paired(args.paired),
        has_factors(kMode != GemmMode::kBf16 && args.scale_kind == ScaleKind::kBlock128) {}

  // Four bits: the first of this warp's 16 rows of operand `a` in a stage, see kWarpRows.
  MOEOPT_DEVICE int stage_row(int a) const {
    const int warp = thread_index() / 32 % 4;
    return kUp ? kBoxRows * a + 16 * warpgroup + 32 * warp : kBoxRows * warpgroup + 64 * a + 16 * warp;
  }

  // Waits until the ring's stage is full.
  MOEOPT_DEVICE void open() {
    mbarrier_wait_parity(ring.full + ring.stage, ring.parity);
    fence_proxy_async();
    if (has_factors) {
      const float* factors = scales() + kFactorOffset + 8 * warpgroup + thread_index() / 32 % 4;
      factor0 = factors[0];
      factor1 = factors[4];
    }
  }
  // The rows of operand 0 and 1, and the tokens.
  MOEOPT_DEVICE const unsigned char* rows(int a) const { return ring.data() + operand_offset<kUp>(warpgroup, a); }
  MOEOPT_DEVICE const unsigned char* tokens() const { return ring.data() + Shape::kWeightBytes; }
  MOEOPT_DEVICE const float* scales() const {
    return reinterpret_cast<const float*>(ring.data() + Shape::kScaleOffset);
  }
  // A block of zero weights may have a scale of zero; a ratio to zero would be infinite.
  MOEOPT_DEVICE void keep_ratio_finite() {
    factor0 = abs_f32(factor0) < kLeastFactor ? kLeastFactor : factor0;
    factor1 = abs_f32(factor1) < kLeastFactor ? kLeastFactor : factor1;
  }
  // Lets the producers refill a stage; all lanes are done with it. Paired: the producers of both blocks write into it.
  MOEOPT_DEVICE void release(int stage) const {
    const int lane = thread_index() % 32;
    if (lane < (paired ? 2 : 1)) mbarrier_arrive_cluster(ring.empty + stage, lane);
  }
};

template <int kRegisters>
MOEOPT_DEVICE void touch_all(float (&values)[kRegisters]) {
  MOEOPT_UNROLL
  for (int r = 0; r < kRegisters; ++r) wgmma_fence_operand(values[r]);
}

// One stage of BF16: 4 steps of K = 16, both operands from shared memory. Leaves one wgmma group in flight.
template <int kColumns>
MOEOPT_DEVICE void multiply_bf16(const unsigned char* rows0, const unsigned char* rows1, const unsigned char* tokens,
                                 bool first, float (&sum0)[kColumns / 2], float (&sum1)[kColumns / 2]) {
  const uint64_t a0 = matrix_descriptor(rows0), a1 = matrix_descriptor(rows1), b = matrix_descriptor(tokens);
  wgmma_fence();
  MOEOPT_UNROLL
  for (int k = 0; k < 4; ++k) {
    const int keep = !first || k > 0;
    wgmma_bf16(sum0, advance_descriptor(a0, 32 * k), advance_descriptor(b, 32 * k), keep);
    wgmma_bf16(sum1, advance_descriptor(a1, 32 * k), advance_descriptor(b, 32 * k), keep);
  }
  wgmma_commit_group();
}

// E4M3 weights of rows g and g + 8 of this warp, K = 16 k + 4 t ..., as BF16 operand registers.
MOEOPT_DEVICE void load_fp8_rows(const unsigned char* rows, int k, uint32_t (&registers)[4]) {
  const int lane = thread_index() % 32, row = thread_index() / 32 % 4 * 16 + lane / 4;
  const unsigned char* source = rows + row * 128 + ((k ^ (row & 7)) << 4) + lane % 4 * 4;
  const uint32_t low = *reinterpret_cast<const uint32_t*>(source);
  const uint32_t high = *reinterpret_cast<const uint32_t*>(source + 8 * 128);  // row + 8: the same swizzle
  registers[0] = cvt_bf16x2_e4m3x2(low);
  registers[1] = cvt_bf16x2_e4m3x2(high);
  registers[2] = cvt_bf16x2_e4m3x2(low >> 16);
  registers[3] = cvt_bf16x2_e4m3x2(high >> 16);
}

// One stage of FP8 weights and BF16 tokens; `second_half`: byte offset of the tokens from K = 64 on. Two register sets:
// one is converted while the other is multiplied.
template <int kColumns>
MOEOPT_DEVICE void multiply_fp8_weights(const unsigned char* rows0, const unsigned char* rows1,
                                        const unsigned char* token_rows, int second_half, float (&part0)[kColumns / 2],
                                        float (&part1)[kColumns / 2]) {
  const uint64_t b = matrix_descriptor(token_rows);
  uint32_t a0[2][4], a1[2][4];
  MOEOPT_UNROLL
  for (int k = 0; k < 8; ++k) {
    load_fp8_rows(rows0, k, a0[k % 2]);
    load_fp8_rows(rows1, k, a1[k % 2]);
    const uint64_t tokens = advance_descriptor(b, k / 4 * second_half + k % 4 * 32);
    wgmma_fence();
    wgmma_bf16(part0, a0[k % 2], tokens, k > 0);
    wgmma_bf16(part1, a1[k % 2], tokens, k > 0);
    wgmma_commit_group();
    wgmma_wait_group<1>();  // the group before is done, so its registers may be overwritten
  }
  wgmma_wait_group<0>();
}

// In tiles that never have them beside the ring: where the exponents of a lane's rows g and g + 8 of both operands
// start within their first word (StageExponents).
struct StageExponentsOfLane {
  uint32_t selectors[2][2];  // of prmt: that byte of this lane's group, four times
  int groups;                // of a row, from this lane's first on

  // Whether this lane's group of a piece is one of the row: behind the last are the next row's exponents, of which one
  // may not be finite.
  MOEOPT_DEVICE uint32_t piece(int step, int piece) const { return 8 * step + 4 * piece < groups ? 0x00ff00ffu : 0; }
  MOEOPT_DEVICE static const unsigned char* of_stage(const unsigned char* in_stage, int /*step*/) { return in_stage; }
  // That of row `row` of the stage, which is this lane's row of operand `a`.
  MOEOPT_DEVICE uint32_t factor(const unsigned char* in_stage, int row, int piece, int a, int half,
                                uint32_t mask) const {
    const auto* words = reinterpret_cast<const uint32_t*>(in_stage) + row * 4 + piece;
    return mxfp4_factor(prmt(words[0], words[1], selectors[a][half]) & mask);
  }
  MOEOPT_DEVICE static void turn(uint32_t codes, uint32_t factor, uint32_t (&values)[4]) {
    bf16_of_e2m1(codes, factor, values);
  }

  template <bool kUp>
  MOEOPT_DEVICE static StageExponentsOfLane of(const GemmArgs& args, int expert, int row_tile, int warpgroup) {
    const int groups = args.depth / static_cast<int>(kScaleGroup), lane = thread_index() % 32;
    const int warp = thread_index() / 32 % 4;
    StageExponentsOfLane exponents;
    exponents.groups = groups - lane % 4;
    MOEOPT_UNROLL
    for (int a = 0; a < 2; ++a) {
      MOEOPT_UNROLL
      for (int half = 0; half < 2; ++half) {
        constexpr GemmMode kMode = GemmMode::kMxfp4Weights;
        const int first = first_of_operand<kMode, kUp>(row_tile, warpgroup, a) + warp * kWarpRows<kMode, kUp>;
        const int row = first + lane / 4 + 8 * half;
        const int weight_row = kUp ? w13_row(args.activation, args.rows, row, a) : row;
        const uint8_t* start = args.exponents + (static_cast<int64_t>(expert) * args.weight_rows + weight_row) * groups;
        const auto skew = row < args.rows ? static_cast<uint32_t>(reinterpret_cast<uintptr_t>(start) % 4) : 0;
        exponents.selectors[a][half] = (skew + static_cast<uint32_t>(lane % 4)) * 0x1111u;
      }
    }
    return exponents;
  }
};

// Where the scales of a lane's rows g and g + 8 of both operands lie: in a stage, `row_bytes` per row, or beside the
// ring (TileScales).
template <GemmMode kMode, bool kUp>
struct RowsOfLane {
  int stage[2], beside[2];  // row g of operand 0, 1: its number in a stage, or in the order of memory
  int weight_row[2];        // in the tensor
  uint32_t exists[2];       // all bits, or none: I and H are multiples of 32, so of all 16 rows of the warp alike
  int apart;                // beside the ring: from row g to row g + 8

  MOEOPT_DEVICE RowsOfLane(const GemmArgs& args, int row_tile, int warpgroup) {
    const int g = thread_index() % 32 / 4, warp = thread_index() / 32 % 4;
    const bool alternate = kUp && args.activation == Activation::kSwigluOai;
    apart = alternate ? 16 : 8;
    MOEOPT_UNROLL
    for (int a = 0; a < 2; ++a) {
      const int row = first_of_operand<kMode, kUp>(row_tile, warpgroup, a) + warp * kWarpRows<kMode, kUp> + g;
      const int inside = kUp ? 16 * warpgroup + 32 * warp + g : kBoxRows * warpgroup + 64 * a + 16 * warp + g;
      stage[a] = kUp ? kBoxRows * a + inside : inside;
      beside[a] = alternate ? 2 * inside + a : stage[a];
      weight_row[a] = kUp ? w13_row(args.activation, args.rows, row, a) : row;
      exists[a] = row < args.rows ? ~0u : 0;
    }
  }
};

// The exponents of a lane's rows, of its group in each piece of 128 of K.
struct ExponentsOfLane {
  const unsigned char* tile;  // beside the ring
  bool beside;
  int rows[2], apart;  // byte offsets: of row g of operand 0, 1; from there to row g + 8
  uint32_t exists[2];
  int groups;  // of a row, from this lane's first on

  template <bool kUp>
  MOEOPT_DEVICE static ExponentsOfLane of(const GemmArgs& args, const TileScales& scales, bool beside, int expert,
                                          int row_tile, int warpgroup) {
    constexpr int kRowBytes = GemmShape<GemmMode::kMxfp4Weights, 16>::kExponentBytes;
    const RowsOfLane<GemmMode::kMxfp4Weights, kUp> rows(args, row_tile, warpgroup);
    const int groups = args.depth / static_cast<int>(kScaleGroup), t = thread_index() % 4;
    ExponentsOfLane lane{scales.data(), beside, {}, 0, {rows.exists[0], rows.exists[1]}, groups - t};
    lane.apart = beside ? rows.apart * groups : 8 * kRowBytes;
    const auto base = reinterpret_cast<uintptr_t>(args.exponents) +
                      static_cast<uintptr_t>(expert) * static_cast<uintptr_t>(args.weight_rows * groups);
    MOEOPT_UNROLL
    for (int a = 0; a < 2; ++a) {  // in a stage a row begins at its place in a word (StageExponents)
      const auto skew = static_cast<int>((base + static_cast<uintptr_t>(rows.weight_row[a] * groups)) % 4);
      lane.rows[a] = (beside ? rows.beside[a] * groups : rows.stage[a] * kRowBytes + skew) + t;
    }
    return lane;
  }
  // Whether this lane's group of a piece is one of the row: behind the last are the next row's exponents, of which one
  // may not be finite.
  MOEOPT_DEVICE uint32_t piece(int step, int piece) const { return 8 * step + 4 * piece < groups ? ~0u : 0; }
  MOEOPT_DEVICE const unsigned char* of_stage(const unsigned char* in_stage, int step) const {
    return beside ? tile + 8 * step : in_stage;
  }
  // A byte per lane: four lanes read a word, and rows of any number of groups need no other way. At 64 groups (K =
  // 2048) four of the eight rows share a bank.
  MOEOPT_DEVICE uint32_t factor(const unsigned char* of_stage, int /*row*/, int piece, int a, int half,
                                uint32_t mask) const {
    const uint32_t exponent = of_stage[rows[a] + half * apart + 4 * piece];
    return mxfp4_factor(exponent * 0x00010001u & mask & exists[a]);
  }
  MOEOPT_DEVICE static void turn(uint32_t codes, uint32_t factor, uint32_t (&values)[4]) {
    bf16_of_e2m1(codes, factor, values);
  }
};

// The largest exponent of each of a lane's rows: g and g + 8 of both operands, of a warp's 16.
struct LargestExponents {
  uint32_t rows[2];  // of the operands; rows g and g + 8 in the halves

  MOEOPT_DEVICE uint32_t of(int a, int half) const { return half ? rows[a] >> 16 : rows[a] & 0xffffu; }

  // All loads of up to 64 exponents per row are in flight together; the four lanes of a row have a quarter each.
  template <bool kUp>
  MOEOPT_DEVICE static LargestExponents of_tile(const GemmArgs& args, int expert, int row_tile, int warpgroup) {
    constexpr GemmMode kMode = GemmMode::kMxfp4;
    constexpr int kAtOnce = 4;
    const int groups = args.depth / static_cast<int>(kScaleGroup), lane = thread_index() % 32;
    const int warp = thread_index() / 32 % 4;
    const uint32_t* words[4];
    int skew[4];
    uint32_t top[4] = {};
    MOEOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int first = first_of_operand<kMode, kUp>(row_tile, warpgroup, i / 2) + warp * kWarpRows<kMode, kUp>;
      const int row = first + lane / 4 + i % 2 * 8, inside = row < args.rows ? row : 0;
      const int weight_row = kUp ? w13_row(args.activation, args.rows, inside, i / 2) : inside;
      const uint8_t* start = args.exponents + (static_cast<int64_t>(expert) * args.weight_rows + weight_row) * groups;
      skew[i] = static_cast<int>(reinterpret_cast<uintptr_t>(start) % 4);
      words[i] = reinterpret_cast<const uint32_t*>(start - skew[i]);
    }
    for (int begin = 0; begin < groups + 3; begin += 4 * 4 * kAtOnce) {
      uint32_t word[4][kAtOnce];
      MOEOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        MOEOPT_UNROLL
        for (int j = 0; j < kAtOnce; ++j) {  // no conditions: words past the end repeat the last
          const int last = (skew[i] + groups - 1) / 4, at = begin / 4 + 4 * j + lane % 4;
          word[i][j] = ld_global_nc(words[i] + (at < last ? at : last));
        }
      }
      MOEOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        MOEOPT_UNROLL
        for (int j = 0; j < kAtOnce; ++j) {  // bytes of the rows before and after do not count
          const int last = (skew[i] + groups - 1) / 4, at = begin / 4 + 4 * j + lane % 4;
          uint32_t bytes = word[i][j];
          if (at == 0) bytes &= ~0u << 8 * skew[i];
          if (at >= last) bytes &= ~0u >> 8 * (4 * last + 4 - skew[i] - groups);
          if (at >= last && last == 0) bytes &= ~0u << 8 * skew[i];
          top[i] = max_u16x2(top[i], max_u16x2(bytes & 0x00ff00ffu, bytes >> 8 & 0x00ff00ffu));
        }
      }
    }
    LargestExponents largest;
    MOEOPT_UNROLL
    for (int a = 0; a < 2; ++a) {  // the larger half of either row, both rows in one word
      uint32_t& rows = largest.rows[a];
      rows = prmt(max_u16x2(top[2 * a], top[2 * a] >> 16), max_u16x2(top[2 * a + 1], top[2 * a + 1] >> 16), 0x5410);
      MOEOPT_UNROLL
      for (int mask = 1; mask <= 2; mask *= 2) {
        rows = max_u16x2(rows, bits_from_float(shfl_bfly(float_from_bits(rows), mask)));
      }
    }
    return largest;
  }
};

// The scales and zero points of a lane's rows, of its group in each piece of 128 of K.
struct Int4FactorsOfLane {
  const Int4Factors& of_tensor;
  const unsigned char* tile;  // beside the ring
  bool beside;
  int rows[2], apart;  // byte offsets of scales: of row g of operand 0, 1; from there to row g + 8
  uint32_t exists[2];
  uint32_t phase[2];  // in a stage: the first group of this lane's rows, modulo 4; of rows g and g + 8 it is the same
  int depth;

  struct OfStage {
    const unsigned char *scale, *zero[2];
  };

  template <bool kUp>
  MOEOPT_DEVICE static Int4FactorsOfLane of(const GemmArgs& args, const TileScales& scales, bool beside, int /*expert*/,
                                            int row_tile, int warpgroup) {
    const RowsOfLane<GemmMode::kInt4Weights, kUp> rows(args, row_tile, warpgroup);
    const int groups = args.depth >> args.int4.shift;
    Int4FactorsOfLane lane{args.int4, scales.data(), beside, {}, 0, {rows.exists[0], rows.exists[1]}, {}, args.depth};
    lane.apart = beside ? 2 * rows.apart * groups : 8 * kInt4RowBytes;
    MOEOPT_UNROLL
    for (int a = 0; a < 2; ++a) {
      lane.phase[a] = beside ? 0 : static_cast<uint32_t>(rows.weight_row[a] * groups) % 4;
      lane.rows[a] = beside ? 2 * rows.beside[a] * groups : rows.stage[a] * kInt4RowBytes;
    }
    return lane;
  }
  // All bits, or none where this lane's group of a piece lies behind the row's last: who knows what its factor is.
  MOEOPT_DEVICE uint32_t piece(int step, int piece) const {
    return 256 * step + 128 * piece + 32 * (thread_index() % 4) < depth ? ~0u : 0;
  }
  MOEOPT_DEVICE OfStage of_stage(const unsigned char* in_stage, int step) const {
    const int first = step * (256 >> of_tensor.shift);  // group of the step
    if (beside) {
      const unsigned char* zeros = tile + 2 * kBoxRows * 2 * (depth >> of_tensor.shift) + first;
      return {tile + 2 * first, {zeros, zeros}};
    }
    // A stage has 8, 4 or 2 groups: only the last moves the zero points in their words.
    const auto of_step = static_cast<uint32_t>(first);
    return {
        in_stage,
        {in_stage + kInt4ZeroOffset + (phase[0] + of_step) % 4, in_stage + kInt4ZeroOffset + (phase[1] + of_step) % 4}};
  }
  MOEOPT_DEVICE uint32_t factor(const OfStage& of_stage, int /*row*/, int piece, int a, int half, uint32_t mask) const {
    const int group = (128 * piece + 32 * (thread_index() % 4)) >> of_tensor.shift, row = rows[a] + half * apart;
    const uint32_t scale =
        *reinterpret_cast<const uint16_t*>(of_stage.scale + row + 2 * (group + static_cast<int>(phase[a] % 2)));
    // Beside the ring a zero point has half of a scale's bytes; in a stage a row has the same for both.
    const uint32_t zero =
        of_tensor.zero != nullptr ? of_stage.zero[a][(beside ? row / 2 : row) + group] : kInt4SymmetricZeroPoint;
    return int4_factor(scale, zero) & mask & exists[a];
  }
  MOEOPT_DEVICE static void turn(uint32_t codes, uint32_t factor, uint32_t (&values)[4]) {
    bf16_of_int4(codes, factor, values);
  }
};

// All stages, weights of four bits. A stage has two pieces of 128 along K, of which a lane turns the group t of four
// rows: 8 steps of K = 16 each, whose tokens are 16 places in the order of mxfp4_position. Two register sets: one is
// converted while the other is multiplied.
template <int kColumns, typename Stages, typename Factors>
MOEOPT_DEVICE void multiply_stages_of_four_bits(Stages& stages, const Factors& of_lane, float (&sum0)[kColumns / 2],
                                                float (&sum1)[kColumns / 2]) {
  const int lane = thread_index() % 32, swizzle = lane / 4;
  uint32_t a0[2][2][4], a1[2][2][4];
  for (int step = 0; step < stages.num_steps; ++step) {
    stages.open();
    const uint64_t b = matrix_descriptor(stages.tokens());
    const auto scales = of_lane.of_stage(stages.ring.data() + Stages::Shape::kScaleOffset, step);
    MOEOPT_UNROLL
    for (int piece = 0; piece < 2; ++piece) {
      Vec4 rows[2][2];
      uint32_t factors[2][2];
      const uint32_t mask = of_lane.piece(step, piece);
      MOEOPT_UNROLL
      for (int a = 0; a < 2; ++a) {
        MOEOPT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int row = stages.stage_row(a) + lane / 4 + 8 * half;
          rows[a][half] = *reinterpret_cast<const Vec4*>(stages.ring.data() + row * 128 +
                                                         (((4 * piece + lane % 4) ^ swizzle) << 4));
          factors[a][half] = of_lane.factor(scales, row, piece, a, half, mask);
        }
      }
      MOEOPT_UNROLL
      for (int w = 0; w < 4; ++w) {
        const auto turn = [&](int a, uint32_t (&to)[2][4]) {
          const Vec4 low = rows[a][0], high = rows[a][1];
          uint32_t lows[4], highs[4];
          Factors::turn(w == 0 ? low.x : w == 1 ? low.y : w == 2 ? low.z : low.w, factors[a][0], lows);
          Factors::turn(w == 0 ? high.x : w == 1 ? high.y : w == 2 ? high.z : high.w, factors[a][1], highs);
          MOEOPT_UNROLL
          for (int k = 0; k < 2; ++k) {
            to[k][0] = lows[2 * k];
            to[k][1] = highs[2 * k];
            to[k][2] = lows[2 * k + 1];
            to[k][3] = highs[2 * k + 1];
          }
        };
        turn(0, a0[w % 2]);
        turn(1, a1[w % 2]);
        wgmma_fence();
        MOEOPT_UNROLL
        for (int k = 0; k < 2; ++k) {
          const int position = piece * 8 + w * 2 + k;  // in steps of 32 bytes; 4 to a tile of tokens
          const uint64_t tokens =
              advance_descriptor(b, position / 4 * Stages::kTokensInStage * 128 + position % 4 * 32);
          wgmma_bf16(sum0, a0[w % 2][k], tokens, 1);
          wgmma_bf16(sum1, a1[w % 2][k], tokens, 1);
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();  // the group before is done, so its registers may be overwritten
      }
    }
    wgmma_wait_group<0>();
    bar_warp_sync();
    stages.release(stages.ring.stage);
    stages.ring.advance();
  }
}

// One stage of FP8 x FP8, one operand: 4 steps of K = 32, added to `sum` or replacing it. Does not wait.
template <int kColumns>
MOEOPT_DEVICE void multiply_fp8(const unsigned char* rows, const unsigned char* tokens, bool add,
                                float (&sum)[kColumns / 2]) {
  const uint64_t a = matrix_descriptor(rows), b = matrix_descriptor(tokens);
  wgmma_fence();
  MOEOPT_UNROLL
  for (int k = 0; k < 4; ++k) {
    wgmma_e4m3(sum, advance_descriptor(a, 32 * k), advance_descriptor(b, 32 * k), add || k > 0);
  }
  wgmma_commit_group();
}

// sum += factor * part, kTokenScale: * scale of the column. `factor`: of the warp's 16 rows.
template <bool kTokenScale, int kSums>
MOEOPT_DEVICE void add_scaled(float (&sum)[kSums], float (&part)[kSums], float factor, const float* token_scale) {
  touch_all(part);
  float of_tokens[4];
  MOEOPT_UNROLL
  for (int r = 0; r < kSums; ++r) {
    if (kTokenScale && r % 8 == 0) load_token_scales(of_tokens, token_scale, r / 8);
    sum[r] += (kTokenScale ? factor * of_tokens[r % 8 / 4 * 2 + r % 2] : factor) * part[r];
  }
}

// sum *= factor times the scale of each column.
template <int kSums>
MOEOPT_DEVICE void scale_columns(float (&sum)[kSums], const float* token_scale, float factor) {
  float of_tokens[4];
  MOEOPT_UNROLL
  for (int r = 0; r < kSums; ++r) {
    if (r % 8 == 0) {
      load_token_scales(of_tokens, token_scale, r / 8);
      MOEOPT_UNROLL
      for (float& scale : of_tokens) scale *= factor;
    }
    sum[r] *= of_tokens[r % 8 / 4 * 2 + r % 2];
  }
}

// All stages, MXFP4 weights and E4M3 tokens, added by the tensor cores. As multiply_stages_of_four_bits, with steps of
// K = 32. kTokenScale: tokens have a scale per 128 of K, so the sums are rescaled before each: those of one operand
// while the other is multiplied.
template <int kColumns, bool kTokenScale, typename Stages>
MOEOPT_DEVICE void multiply_stages_mxfp4(Stages& stages, const StageExponentsOfLane& of_lane,
                                         const LargestExponents& largest, float (&sum0)[kColumns / 2],
                                         float (&sum1)[kColumns / 2]) {
  constexpr int kExponentBytes = Stages::Shape::kExponentBytes;
  const int lane = thread_index() % 32, swizzle = lane / 4;
  uint32_t a0[2][4], a1[2][4];
  const auto token_scales = [&] {
    return reinterpret_cast<const float*>(stages.ring.data() + Stages::Shape::kScaleOffset +
                                          2 * kBoxRows * kExponentBytes);
  };
  for (int step = 0; step < stages.num_steps; ++step) {
    stages.open();
    const uint64_t b = matrix_descriptor(stages.tokens());
    MOEOPT_UNROLL
    for (int piece = 0; piece < 2; ++piece) {
      Vec4 rows[2][2];
      E4m3Magnitudes magnitudes[2][2];
      uint32_t below[2][2], most = 0;
      MOEOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int a = i / 2, half = i % 2, row = stages.stage_row(a) + lane / 4 + 8 * half;
        rows[a][half] =
            *reinterpret_cast<const Vec4*>(stages.ring.data() + row * 128 + (((4 * piece + lane % 4) ^ swizzle) << 4));
        const auto* words =
            reinterpret_cast<const uint32_t*>(stages.ring.data() + Stages::Shape::kScaleOffset + row * kExponentBytes) +
            piece;
        // Behind a row's last group lie the next row's exponents, but only zero weights. Rows 8 apart have the same
        // skew, so one selector serves both; rows 64 apart likewise.
        const uint32_t selector = of_lane.selectors[kTokenScale ? 0 : a][0];
        below[a][half] = largest.of(a, half) - (prmt(words[0], words[1], selector) & 0xffu);
        magnitudes[a][half] = e4m3_magnitudes(below[a][half]);
        most = below[a][half] > most ? below[a][half] : most;
      }
      if (most > kMostPlainBinades) {  // rare
        MOEOPT_UNROLL
        for (int i = 0; i < 4; ++i) magnitudes[i / 2][i % 2] = e4m3_magnitudes_below(below[i / 2][i % 2]);
      }
      MOEOPT_UNROLL
      for (int w = 0; w < 4; ++w) {
        const auto turn = [&](int a, uint32_t (&to)[4]) {
          const Vec4 low = rows[a][0], high = rows[a][1];
          uint32_t lows[2], highs[2];
          e4m3_of_e2m1(w == 0 ? low.x : w == 1 ? low.y : w == 2 ? low.z : low.w, magnitudes[a][0], lows);
          e4m3_of_e2m1(w == 0 ? high.x : w == 1 ? high.y : w == 2 ? high.z : high.w, magnitudes[a][1], highs);
          to[0] = lows[0];
          to[1] = highs[0];
          to[2] = lows[1];
          to[3] = highs[1];
        };
        turn(0, a0[w % 2]);
        turn(1, a1[w % 2]);
        const uint64_t tokens = advance_descriptor(b, piece * Stages::kTokensInStage * 128 + w * 32);
        if (kTokenScale && w == 0) {
          wgmma_wait_group<0>();
          const float* ratios = token_scales() + kMxfp4Ratios * (1 + piece);
          touch_all(sum0);
          touch_all(sum1);
          scale_columns(sum0, ratios, 1.0f);
          wgmma_fence();
          wgmma_e4m3(sum0, a0[w % 2], tokens, 1);
          wgmma_commit_group();
          scale_columns(sum1, ratios, 1.0f);
          touch_all(sum1);
          wgmma_fence();
          wgmma_e4m3(sum1, a1[w % 2], tokens, 1);
          wgmma_commit_group();
          continue;
        }
        wgmma_fence();
        wgmma_e4m3(sum0, a0[w % 2], tokens, 1);
        wgmma_e4m3(sum1, a1[w % 2], tokens, 1);
        wgmma_commit_group();
        wgmma_wait_group<1>();  // the group before is done, so its registers may be overwritten
      }
    }
    wgmma_wait_group<0>();
    if (step == stages.num_steps - 1) {
      touch_all(sum0);
      touch_all(sum1);
      scale_columns(sum0, token_scales(), 1.0f);
      scale_columns(sum1, token_scales(), 1.0f);
    }
    bar_warp_sync();
    stages.release(stages.ring.stage);
    stages.ring.advance();
  }
}

// All stages of a tile, BF16. A stage is released when the products of the next one are in flight.
template <int kColumns, typename Stages>
MOEOPT_DEVICE void multiply_stages_bf16(Stages& stages, float (&sum0)[kColumns / 2], float (&sum1)[kColumns / 2]) {
  int before = -1;
  for (int step = 0; step < stages.num_steps; ++step) {
    stages.open();
    multiply_bf16<kColumns>(stages.rows(0), stages.rows(1), stages.tokens(), step == 0, sum0, sum1);
    wgmma_wait_group<1>();
    if (before >= 0) stages.release(before);
    before = stages.ring.stage;
    stages.ring.advance();
  }
  wgmma_wait_group<0>();
  stages.release(before);
}

template <int kColumns, typename Stages>
MOEOPT_DEVICE void multiply_stages_fp8_weights(Stages& stages, float (&sum0)[kColumns / 2],
                                               float (&sum1)[kColumns / 2]) {
  for (int step = 0; step < stages.num_steps; ++step) {
    stages.open();
    float part0[kColumns / 2], part1[kColumns / 2];
    multiply_fp8_weights<kColumns>(stages.rows(0), stages.rows(1), stages.tokens(), Stages::kTokensInStage * 128, part0,
                                   part1);
    add_scaled<false>(sum0, part0, stages.factor0, nullptr);
    add_scaled<false>(sum1, part1, stages.factor1, nullptr);
    bar_warp_sync();
    stages.release(stages.ring.stage);
    stages.ring.advance();
  }
}

// All stages, FP8 x FP8, FP32 sums. The second operand is multiplied while the first is added; the next stage is opened
// meanwhile. kTokenScale: tokens have a scale per 128 of K; else one scale, which arrives with the last stage.
template <int kColumns, bool kTokenScale, typename Stages>
MOEOPT_DEVICE void multiply_stages_fp8_narrow(Stages& stages, float (&sum0)[kColumns / 2],
                                              float (&sum1)[kColumns / 2]) {
  stages.open();
  for (int step = 0; step < stages.num_steps; ++step) {
    const bool last = step == stages.num_steps - 1;
    const int stage = stages.ring.stage;
    const float* token_scale = stages.scales();
    const float factor0 = stages.factor0, factor1 = stages.factor1;
    float part0[kColumns / 2], part1[kColumns / 2];
    multiply_fp8<kColumns>(stages.rows(0), stages.tokens(), false, part0);
    multiply_fp8<kColumns>(stages.rows(1), stages.tokens(), false, part1);
    wgmma_wait_group<1>();
    add_scaled<kTokenScale>(sum0, part0, factor0, token_scale);
    stages.ring.advance();
    if (!last) stages.open();
    wgmma_wait_group<0>();
    add_scaled<kTokenScale>(sum1, part1, factor1, token_scale);
    if (!kTokenScale && last) {
      scale_columns(sum0, token_scale, 1.0f);
      scale_columns(sum1, token_scale, 1.0f);
    }
    bar_warp_sync();  // all lanes have read the scales
    stages.release(stage);
  }
}

// The scales of this thread's columns, times `factor`.
template <int kFactors>
MOEOPT_DEVICE void column_factors(float (&factors)[kFactors], float factor, const float* token_scale) {
  MOEOPT_UNROLL
  for (int q = 0; q < kFactors / 4; ++q) {
    float of_tokens[4];
    load_token_scales(of_tokens, token_scale, q);
    MOEOPT_UNROLL
    for (int i = 0; i < 4; ++i) factors[4 * q + i] = factor * of_tokens[i];
  }
}

// All stages, FP8 x FP8, added by the tensor cores: one operand is rescaled while the other is multiplied. No product
// is in flight from one round to the next; otherwise ptxas serialises all products.
template <int kColumns, bool kTokenScale, typename Stages>
MOEOPT_DEVICE void multiply_stages_fp8_wide(Stages& stages, float (&sum0)[kColumns / 2], float (&sum1)[kColumns / 2]) {
  // Ratio of this step's scales to the next step's: of the weights, and of this thread's columns.
  float ratio0 = 1.0f, ratio1 = 1.0f, ratios[kTokenScale ? kColumns / 4 : 1];
  MOEOPT_UNROLL
  for (float& ratio : ratios) ratio = 1.0f;
  const auto rescale = [&](auto& sum, float ratio) {
    touch_all(sum);
    MOEOPT_UNROLL
    for (int r = 0; r < kColumns / 2; ++r) sum[r] *= kTokenScale ? ratios[r / 8 * 4 + r % 8 / 4 * 2 + r % 2] : ratio;
    touch_all(sum);
  };
  stages.open();
  stages.keep_ratio_finite();
  int before = -1;
  for (int left = stages.num_steps - 1; left >= 0; --left) {
    wgmma_wait_group<0>();
    rescale(sum1, ratio1);
    bar_warp_sync();  // all lanes have read the scales
    if (before >= 0) stages.release(before);
    before = stages.ring.stage;
    multiply_fp8<kColumns>(stages.rows(0), stages.tokens(), true, sum0);
    multiply_fp8<kColumns>(stages.rows(1), stages.tokens(), true, sum1);
    if (left > 0) {
      const float factor0 = stages.factor0, factor1 = stages.factor1;
      stages.ring.advance();
      stages.open();
      stages.keep_ratio_finite();
      ratio0 = factor0 * rcp_approx(stages.factor0);
      ratio1 = factor1 * rcp_approx(stages.factor1);
      // kTokenScale: the rows of both operands are in one block of 128, so their ratios are equal.
      if constexpr (kTokenScale) column_factors(ratios, ratio0, stages.scales() + kRatioOffset);
    } else {
      ratio0 = stages.factor0;
      ratio1 = stages.factor1;
      if constexpr (kTokenScale) column_factors(ratios, ratio0, stages.scales());
    }
    wgmma_wait_group<1>();
    if (kTokenScale || left > 0) rescale(sum0, ratio0);
  }
  wgmma_wait_group<0>();
  if constexpr (kTokenScale) {
    rescale(sum1, ratio1);
  } else {
    touch_all(sum0);
    touch_all(sum1);
    scale_columns(sum0, stages.scales(), ratio0);
    scale_columns(sum1, stages.scales(), ratio1);
  }
  bar_warp_sync();
  stages.release(stages.ring.stage);
  stages.ring.advance();
}

}  // namespace moeopt
