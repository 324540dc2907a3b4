// The experts for AVX2 with FMA and F16C: 8 FP32 lanes; activations are FP32, weights become FP32 on the way in.
// Drawing: simd/experts.h.
#include <immintrin.h>

#include "simd/avx2.h"
#include "simd/formats_fp32.h"

namespace moeopt {
namespace {

// A BF16 is the upper half of an FP32, so 16 of them become 8 even and 8 odd ones with a shift and a mask.
// Activations are kept in that order: per 16 columns the 8 even ones, then the 8 odd ones.
struct Avx2BFloat16 : Fp32Format<Avx2, BFloat16> {
  using Weight = BFloat16;
  using Decoded = Avx2BFloat16;
  // The mask takes a register too; with 3 the compiler runs out of them: measured 0.6 of the speed.
  static constexpr int kMaxTokens = 2;
  static constexpr int kTileTokens = kMaxTokens;
  static constexpr int kStep = 16, kParts = 2;
  static Operand weight(const Weight* w, int part) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    return _mm256_castsi256_ps(part == 0 ? _mm256_slli_epi32(pairs, 16)
                                         : _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static void store_activations(const float* values, char* row, int64_t column) {
    float* even = reinterpret_cast<float*>(row) + column;
    for (int n = 0; n < kRows / 2; ++n) {
      even[n] = values[2 * n];
      even[8 + n] = values[2 * n + 1];
    }
  }
};

// 16 codes. E4M3 moved into the bits of an FP16 is the value times 2^-8, subnormals included; only NaN needs a case.
inline __m256i fp8_to_fp16_bits(const Float8E4M3* w) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  const __m256i largest = _mm256_set1_epi16(0x3f80);
  return _mm256_or_si256(bits, _mm256_cmpeq_epi16(_mm256_and_si256(bits, largest), largest));
}

template <typename X>
struct Avx2Float8 : Fp32Format<Avx2, X> {
  using Weight = Float8E4M3;
  using Decoded = DecodedFp8Weights<Avx2, X>;
  static constexpr bool kDecodes = true;
  static constexpr float kUnit = 256.0f;
  static constexpr int kStep = 16, kParts = 2;
  static __m256 weight(const Weight* w, int part) {
    const __m256i bits = fp8_to_fp16_bits(w);
    return _mm256_cvtph_ps(part == 0 ? _mm256_castsi256_si128(bits) : _mm256_extracti128_si256(bits, 1));
  }
  // `ahead`: half as many bytes to fetch meanwhile, or null.
  static void decode_row(const Weight* w, int64_t columns, Float16* out, const char* ahead) {
    for (int64_t k = 0; k < columns; k += 16) {
      if (ahead && k % 128 == 0) __builtin_prefetch(ahead + k / 2, 0, 2);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k), fp8_to_fp16_bits(w + k));
    }
  }
};

// The upper and the lower byte of the BF16 of each code, for both halves of a register.
inline __m256i both_halves(__m128i table) { return _mm256_broadcastsi128_si256(table); }
inline __m256i upper_bytes() {
  return both_halves(_mm_setr_epi8(0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41, -0x41, -0x40,
                                   -0x40, -0x40, -0x40));
}
inline __m256i lower_bytes() {
  return both_halves(_mm_setr_epi8(0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40, 0x00, 0x00, -0x80, -0x40, 0x00,
                                   0x40, -0x80, -0x40));
}

// The weights of a step of Avx2Float4, from the bytes of the BF16 of each code.
inline void look_up(__m256i codes, __m256i upper, __m256i lower, __m256 (&weight)[8]) {
  const __m256i low_half = _mm256_set1_epi8(15), high_word = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i even = _mm256_and_si256(codes, low_half);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low_half);
  const __m256i even_upper = _mm256_shuffle_epi8(upper, even), even_lower = _mm256_shuffle_epi8(lower, even);
  const __m256i odd_upper = _mm256_shuffle_epi8(upper, odd), odd_lower = _mm256_shuffle_epi8(lower, odd);
  const __m256i words[4] = {_mm256_unpacklo_epi8(even_lower, even_upper), _mm256_unpacklo_epi8(odd_lower, odd_upper),
                            _mm256_unpackhi_epi8(even_lower, even_upper), _mm256_unpackhi_epi8(odd_lower, odd_upper)};
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    const int first = n / 2 * 4 + n % 2;
    weight[first] = _mm256_castsi256_ps(_mm256_slli_epi32(words[n], 16));
    weight[first + 2] = _mm256_castsi256_ps(_mm256_and_si256(words[n], high_word));
  }
}

// A step is 64 columns, two groups. Look-ups of bytes give the BF16 of 16 codes, a shift and a mask the FP32 of 8 each.
// Column 32 g + 16 h + 4 i + r of a step is lane 4 g + i of part 4 h + r, in weights and in activations.
template <typename X>
struct Avx2Float4 : Fp4Format<Avx2, X> {
  using Weight = Float4E2M1Pair;
  using Decoded = Avx2Float4;
  static constexpr int kMaxTokens = 4;
  static constexpr int kTileTokens = kMaxTokens;
  static constexpr int kStep = 64, kParts = 8;
  // Eight products one after the other take longer than decoding the next row meanwhile.
  static constexpr int kGroupSums = 2;

  static __m256i codes(const void* w) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)); }
  // The tail is one group: the lower half of every register.
  static __m256i codes_first(const void* w, int64_t /*columns*/) {
    return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  }
  static __m256 activation_tail(const char* x, int64_t k, int part, int64_t /*columns*/) {
    return _mm256_zextps128_ps256(_mm_loadu_ps(reinterpret_cast<const float*>(x) + k + part * 8));
  }
  static void decode(__m256i codes, const ExponentGroups& /*groups*/, int64_t /*k*/, int64_t /*columns*/,
                     __m256 (&weight)[kParts]) {
    look_up(codes, upper_bytes(), lower_bytes(), weight);
  }
  // Each exponent into the upper byte of the four lanes of its group, then in its place.
  static __m256 factor(const ExponentGroups& groups, int64_t k, int64_t columns) {
    const uint8_t* exponents = groups.exponents + k / kScaleGroup;
    uint16_t both = exponents[0];
    if (columns == kStep) std::memcpy(&both, exponents, sizeof(both));
    const __m256i spread = _mm256_setr_epi32(0x00808080, 0x00808080, 0x00808080, 0x00808080, 0x01808080, 0x01808080,
                                             0x01808080, 0x01808080);
    const __m256i upper = _mm256_shuffle_epi8(_mm256_set1_epi16(static_cast<int16_t>(both)), spread);
    return _mm256_castsi256_ps(_mm256_srli_epi32(upper, 1));
  }
  static void store_activations(const float* values, char* row, int64_t column) {
    const int64_t group = column % kStep / 32, half = column % 32 / 16;
    float* lanes = reinterpret_cast<float*>(row) + column / kStep * kStep + half * 32 + group * 4;
    __m128 part[4] = {_mm_loadu_ps(values), _mm_loadu_ps(values + 4), _mm_loadu_ps(values + 8),
                      _mm_loadu_ps(values + 12)};
    _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
    for (int r = 0; r < 4; ++r) _mm_storeu_ps(lanes + r * 8, part[r]);
  }
};

// The bytes of the BF16 of -15 to 15, all exact. The 16 from place 15 - zero on are those of code - zero for each code.
struct IntegerBytes {
  uint8_t upper[31];
  uint8_t lower[31];
  constexpr IntegerBytes() : upper(), lower() {
    for (int place = 0; place < 31; ++place) {
      const int value = place - 15;
      const uint32_t magnitude = static_cast<uint32_t>(value < 0 ? -value : value);
      uint32_t exponent = 0, bits = 0;
      while ((magnitude >> exponent) > 1) ++exponent;
      if (magnitude)
        bits = ((127 + exponent) << 7) | ((magnitude << (7 - exponent)) & 0x7fu) | (value < 0 ? 0x8000u : 0);
      upper[place] = static_cast<uint8_t>(bits >> 8);
      lower[place] = static_cast<uint8_t>(bits & 0xff);
    }
  }
};
constexpr IntegerBytes kIntegerBytes;

// As Avx2Float4, but each half of a register, 32 columns, has the table of its zero point: subtracting costs nothing.
// Where the halves have one group in common, they have one table and one scale.
template <typename X>
struct Avx2Int4 : Avx2Float4<X> {
  using Weight = Int4Pair;
  using Decoded = Avx2Int4;
  using Groups = Int4Groups;
  using Avx2Float4<X>::kStep;
  static constexpr bool kLoopsByScales = true;

  // The tail has one group: its codes are the lower half.
  static int64_t second(int64_t k, int64_t columns) { return columns == kStep ? k + kScaleGroup : k; }
  // Of the codes of a zero point.
  static __m128i table(const uint8_t* bytes, int zero) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 15 - zero));
  }
  static void decode(__m256i codes, const Int4Groups& groups, int64_t k, int64_t columns, __m256 (&weight)[8]) {
    const int low = groups.zero_at(k);
    if (groups.shift > 0 || !groups.has_zero) {
      return look_up(codes, both_halves(table(kIntegerBytes.upper, low)), both_halves(table(kIntegerBytes.lower, low)),
                     weight);
    }
    const int high = groups.zero_at(second(k, columns));
    look_up(codes, _mm256_set_m128i(table(kIntegerBytes.upper, high), table(kIntegerBytes.upper, low)),
            _mm256_set_m128i(table(kIntegerBytes.lower, high), table(kIntegerBytes.lower, low)), weight);
  }
  static __m256 factor(const Int4Groups& groups, int64_t k, int64_t columns) {
    const __m256i low = _mm256_set1_epi16(static_cast<int16_t>(groups.scale_at(k)));
    __m256i both = low;
    if (groups.shift == 0) {
      const __m256i high = _mm256_set1_epi16(static_cast<int16_t>(groups.scale_at(second(k, columns))));
      // Which lanes is an immediate, also for a compiler that does not optimise.
      both = groups.scale_is_fp16 ? _mm256_blend_epi32(low, high, 0x0c) : _mm256_blend_epi32(low, high, 0xf0);
    }
    if (groups.scale_is_fp16) return _mm256_cvtph_ps(_mm256_castsi256_si128(both));
    return _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  }
};

}  // namespace

const ExpertKernels* avx2_int4_kernels(DType x_dtype) { return kernels_of_x<Avx2Int4>(x_dtype); }

const ExpertKernels* avx2_kernels(const FusedExpertsArgs& args) {
  return fp32_kernels<Avx2, Avx2BFloat16, Avx2Float8, Avx2Float4>(args);
}

}  // namespace moeopt
