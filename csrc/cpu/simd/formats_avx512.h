// AVX-512 (F, BW, DQ, VL): 16 FP32 lanes; activations are FP32, weights become FP32 on the way in.
#pragma once

#include <immintrin.h>

#include "formats_fp32.h"

namespace moeopt {
namespace {

struct Avx512 {
  using Vec = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kMaxTokens = 6;  // 24 sums, 6 activations, 1 row
  static constexpr int kTileTokens = 5;
  static constexpr int kWideTokensOfFp16 = 3;
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec set1(float v) { return _mm512_set1_ps(v); }
  static Vec fmadd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static Vec round(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Vec times_power_of_two(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }
  static Vec load_fp16(const Float16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Vec load_bf16(const BFloat16* p) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  }
  // Four sums of lanes: pairs of registers become one, then quarters of a register are added.
  static void store_sums(const Vec* v, float* out) {
    const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512d lows = _mm512_castps_pd(low), highs = _mm512_castps_pd(high);
    const __m512 four = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(lows, highs)),
                                      _mm512_castpd_ps(_mm512_unpackhi_pd(lows, highs)));
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
  }
  static void store_rounded(const float* values, float* out) { store(out, load(values)); }
  static void store_rounded(const float* values, Float16* out) {
    const __m256i halves = _mm512_cvtps_ph(load(values), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), halves);
  }
  static void store_rounded(const float* values, BFloat16* out) {
    for (int n = 0; n < kRows; ++n) from_float(values[n], out + n);
  }
};

// A BF16 is the upper half of an FP32, so 32 of them become 16 even and 16 odd ones with a shift and a mask.
// Activations are kept in that order: per 32 columns the 16 even ones, then the 16 odd ones.
struct Avx512BFloat16 : Fp32Format<Avx512, BFloat16> {
  using Weight = BFloat16;
  using Decoded = Avx512BFloat16;
  // Chosen by measurement: among several, a tile of 3 leaves the L1 cache to the weights, 1.15 times as fast as 5.
  static constexpr int kTileTokens = 3;
  static constexpr int kWideTokens = 3;
  static constexpr int kStep = 32, kParts = 2;
  static __m512 half(__m512i pairs, int part) {
    return _mm512_castsi512_ps(part == 0 ? _mm512_slli_epi32(pairs, 16)
                                         : _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static Operand weight(const Weight* w, int part) { return half(_mm512_loadu_si512(w), part); }
  static Operand weight_tail(const Weight* w, int part, int64_t columns) {
    return half(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << (columns / 2)) - 1), w), part);
  }
  static Operand activation_tail(const char* x, int64_t k, int part, int64_t columns) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << (columns / 2)) - 1),
                                 reinterpret_cast<const float*>(x) + k + part * 16);
  }
  static void store_activations(const float* values, char* row, int64_t column) {
    float* even = reinterpret_cast<float*>(row) + column / 32 * 32 + column % 32 / 2;
    for (int n = 0; n < kRows / 2; ++n) {
      even[n] = values[2 * n];
      even[16 + n] = values[2 * n + 1];
    }
  }
};

// 32 codes. E4M3 moved into the bits of an FP16 is the value times 2^-8, subnormals included; only NaN needs a case.
inline __m512i fp8_to_fp16_bits(__m256i codes) {
  const __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
  const __m512i bits = _mm512_and_si512(wide, _mm512_set1_epi16(static_cast<short>(0xbfff)));
  const __m512i largest = _mm512_set1_epi16(0x3f80);
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, largest), largest);
  return _mm512_mask_mov_epi16(bits, nan, _mm512_set1_epi16(0x7e00));
}

// 16 of 32 FP16 (part 0 or 1) as FP32.
inline __m512 half_of_fp16(__m512i bits, int part) {
  return _mm512_cvtph_ps(part == 0 ? _mm512_castsi512_si256(bits) : _mm512_extracti64x4_epi64(bits, 1));
}

template <typename X>
struct Avx512Float8 : Fp32Format<Avx512, X> {
  using Weight = Float8E4M3;
  using Decoded = DecodedFp8Weights<Avx512, X>;
  static constexpr bool kDecodes = true;
  // With one or two tokens decoding takes longer than reading.
  static constexpr int64_t row_ahead_bytes(int tokens) { return tokens < 3 ? 0 : 2048; }
  static constexpr float kUnit = 256.0f;
  static constexpr int kStep = 32, kParts = 2;
  static __m256i load(const Weight* w) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)); }
  static __m512 weight(const Weight* w, int part) { return half_of_fp16(fp8_to_fp16_bits(load(w)), part); }
  // The tail is 16 columns: all of part 0.
  static __m512 weight_tail(const Weight* w, int part, int64_t /*columns*/) {
    if (part != 0) return _mm512_setzero_ps();
    const __m256i codes = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
    return half_of_fp16(fp8_to_fp16_bits(codes), 0);
  }
  static __m512 activation_tail(const char* x, int64_t k, int part, int64_t /*columns*/) {
    return part == 0 ? Avx512Float8::activation(x, k, 0) : _mm512_setzero_ps();
  }
  // `ahead`: half as many bytes to fetch meanwhile, or null.
  static void decode_row(const Weight* w, int64_t columns, Float16* out, const char* ahead) {
    int64_t k = 0;
    for (; k + 32 <= columns; k += 32) {
      if (ahead && k % 128 == 0) __builtin_prefetch(ahead + k / 2, 0, 2);
      _mm512_storeu_si512(out + k, fp8_to_fp16_bits(load(w + k)));
    }
    if (k < columns) {
      const __m256i codes = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + k)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k), _mm512_castsi512_si256(fp8_to_fp16_bits(codes)));
    }
  }
};

// A step is 128 columns, four groups. What the formats with FP32 and with BF16 products have in common: how codes and
// exponents are loaded. Lane i of every register has the codes of columns 8 i to 8 i + 7.
struct Avx512Float4Codes {
  static constexpr int kStep = 128;

  static __m512i codes(const void* w) { return _mm512_loadu_si512(w); }
  static __mmask16 lanes_of(int64_t columns) { return static_cast<__mmask16>((1u << (columns / 8)) - 1); }
  static __m512i codes_first(const void* w, int64_t columns) { return _mm512_maskz_loadu_epi32(lanes_of(columns), w); }
  // Each exponent into the upper byte of the four lanes of its group, then in its place.
  static __m512 factor(const ExponentGroups& groups, int64_t k, int64_t columns) {
    const uint8_t* exponents = groups.exponents + k / kScaleGroup;
    uint32_t four = 0;
    if (columns == kStep) {
      std::memcpy(&four, exponents, sizeof(four));
    } else {
      for (int64_t group = 0; group < columns / kScaleGroup; ++group) {
        four |= static_cast<uint32_t>(exponents[group]) << (8 * group);
      }
    }
    const __m512i group_of_lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i spread = _mm512_or_si512(_mm512_slli_epi32(group_of_lane, 24), _mm512_set1_epi32(0x00808080));
    const __m512i upper = _mm512_shuffle_epi8(_mm512_set1_epi32(static_cast<int>(four)), spread);
    return _mm512_castsi512_ps(_mm512_srli_epi32(upper, 1));
  }
};

// Column 8 i + p of a step is lane i of part p, in weights and in activations: a shift and a look-up for 16 weights.
template <typename X>
struct Avx512Float4 : Fp4Format<Avx512, X>, Avx512Float4Codes {
  using Weight = Float4E2M1Pair;
  using Decoded = Avx512Float4;
  using Avx512Float4Codes::kStep;
  static constexpr int kParts = 8;

  static void decode(__m512i codes, const ExponentGroups& /*groups*/, int64_t /*k*/, int64_t /*columns*/,
                     __m512 (&weight)[kParts]) {
    const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                        -2.0f, -3.0f, -4.0f, -6.0f);
    // The look-up reads four bits of each lane.
#pragma GCC unroll 8
    for (int part = 0; part < kParts; ++part) {
      weight[part] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * part), table);
    }
  }
  static __m512 activation_tail(const char* x, int64_t k, int part, int64_t columns) {
    return _mm512_maskz_loadu_ps(lanes_of(columns), reinterpret_cast<const float*>(x) + k + part * 16);
  }
  static void store_activations(const float* values, char* row, int64_t column) {
    float* lanes = reinterpret_cast<float*>(row) + column / kStep * kStep + column % kStep / 8;
    for (int n = 0; n < kRows; ++n) lanes[n % 8 * 16 + n / 8] = values[n];
  }
};

// What INT4's formats with FP32 and with BF16 products have in common: scales and zero points of a step. Lane i of a
// register has 8 columns, so a group of the weights is 4, 8 or 16 lanes.
struct Avx512Int4Groups {
  // Elements of the groups of `columns` columns, one to four: the mask of a load that reads no more.
  static unsigned mask_of(const Int4Groups& groups, int64_t columns) {
    return (2u << ((columns / kScaleGroup - 1) >> groups.shift)) - 1;
  }
  // Which of these elements belongs to each lane.
  static __m512i element_of_lane(const Int4Groups& groups) {
    const __m512i group_of_lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_srl_epi32(group_of_lane, _mm_cvtsi32_si128(groups.shift));
  }
  // The zero point of each lane, in those of its bytes that `bytes` has a 1 for.
  static __m512i zero(const Int4Groups& groups, int64_t k, int64_t columns, uint32_t bytes) {
    const __mmask16 mask = static_cast<__mmask16>(mask_of(groups, columns));
    const __m128i four = _mm_maskz_loadu_epi8(mask, groups.zero + ((k / kScaleGroup) >> groups.shift));
    const __m512i element = _mm512_mullo_epi32(element_of_lane(groups), _mm512_set1_epi32(static_cast<int>(bytes)));
    const __m512i others = _mm512_set1_epi32(static_cast<int>(0x80 * (0x01010101 - bytes)));
    return _mm512_shuffle_epi8(_mm512_broadcastd_epi32(four), _mm512_or_si512(element, others));
  }
  static __m512 factor(const Int4Groups& groups, int64_t k, int64_t columns) {
    const __mmask8 mask = static_cast<__mmask8>(mask_of(groups, columns));
    const __m128i four = _mm_maskz_loadu_epi16(mask, groups.scale + ((k / kScaleGroup) >> groups.shift));
    const __m512i element = element_of_lane(groups);
    if (groups.scale_is_fp16) return _mm512_permutexvar_ps(element, _mm512_cvtph_ps(_mm256_zextsi128_si256(four)));
    // A BF16 is the upper half of an FP32.
    const __m512i upper = _mm512_slli_epi32(element, 16);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, upper, _mm512_castsi128_si512(four)));
  }
};

// As Avx512Float4; the look-up gives the code as a number, of which the zero point of its lane is taken. Without zero
// points it gives the code less 8.
template <typename X>
struct Avx512Int4 : Avx512Float4<X> {
  using Weight = Int4Pair;
  using Decoded = Avx512Int4;
  using Groups = Int4Groups;

  static void decode(__m512i codes, const Int4Groups& groups, int64_t k, int64_t columns, __m512 (&weight)[8]) {
    __m512 table = _mm512_setr_ps(0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 9.0f, 10.0f, 11.0f, 12.0f,
                                  13.0f, 14.0f, 15.0f);
    if (!groups.has_zero) table = _mm512_sub_ps(table, _mm512_set1_ps(kInt4SymmetricZero));
#pragma GCC unroll 8
    for (int part = 0; part < 8; ++part) {
      weight[part] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * part), table);
    }
    if (!groups.has_zero) return;
    const __m512 zero = _mm512_cvtepi32_ps(Avx512Int4Groups::zero(groups, k, columns, 0x00000001));
#pragma GCC unroll 8
    for (int part = 0; part < 8; ++part) weight[part] = _mm512_sub_ps(weight[part], zero);
  }
  static __m512 factor(const Int4Groups& groups, int64_t k, int64_t columns) {
    return Avx512Int4Groups::factor(groups, k, columns);
  }
};

}  // namespace
}  // namespace moeopt
