// The experts for AVX-512 with BF16 dot products (32 products of BF16 per instruction, summed in 16 FP32 lanes) and
// VBMI; other dtypes as on avx512. Drawing: simd/experts.h.
#include "simd/formats_avx512.h"

namespace moeopt {
namespace {

// BF16 activations, read as x has them; the SwiGLU result is rounded to BF16.
struct DotBFloat16 : Fp32Format<Avx512, BFloat16> {
  using Operand = __m512bh;
  using Weight = BFloat16;
  using Decoded = DotBFloat16;
  static constexpr int kTileTokens = 4;  // with block scales each sum is two: 32
  static constexpr int kWideTokens = 3;
  // With one or two tokens the processor fetches ahead by itself, and is measured slower with hints.
  static constexpr int64_t row_ahead_bytes(int tokens) { return tokens < 3 ? 0 : 2048; }
  static constexpr int64_t kActivationBytes = 2;
  static constexpr bool kPacks = false;
  static constexpr int kStep = 32;

  static Vec multiply_add(Operand a, Operand b, Vec acc) { return _mm512_dpbf16_ps(acc, a, b); }

  static __m512bh load(const void* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
  // The first min(columns, 32) of them, the rest zero.
  static __m512bh load_first(const void* p, int64_t columns) {
    const __mmask32 mask = columns >= 32 ? 0xffffffffu : columns <= 0 ? 0u : (1u << columns) - 1;
    return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, p));
  }

  static Operand activation(const char* x, int64_t k, int part) { return load(x + 2 * (k + 32 * part)); }
  static Operand activation_tail(const char* x, int64_t k, int part, int64_t columns) {
    return load_first(x + 2 * (k + 32 * part), columns - 32 * part);
  }
  static Operand weight(const Weight* w, int /*part*/) { return load(w); }
  static Operand weight_tail(const Weight* w, int /*part*/, int64_t columns) { return load_first(w, columns); }

  static void store_activations(const float* values, char* row, int64_t column) {
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(values));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 2 * column), reinterpret_cast<__m256i>(rounded));
  }
};

// The BF16 of each of the 128 non-negative E4M3 codes, upper and lower bytes. All are exact.
struct Float8Table {
  alignas(64) uint8_t upper[128];
  alignas(64) uint8_t lower[128];
  constexpr Float8Table() : upper(), lower() {
    for (uint32_t code = 0; code < 128; ++code) {
      uint32_t exponent = code >> 3, mantissa = code & 7u, bits = 0;
      if (code == 127) {
        bits = 0x7fc0;
      } else if (exponent != 0) {
        bits = ((exponent + 120) << 7) | (mantissa << 4);
      } else if (mantissa != 0) {  // mantissa * 2^-9, made normal
        exponent = 121;
        while ((mantissa & 8u) == 0) {
          mantissa <<= 1;
          --exponent;
        }
        bits = (exponent << 7) | ((mantissa & 7u) << 4);
      }
      upper[code] = static_cast<uint8_t>(bits >> 8);
      lower[code] = static_cast<uint8_t>(bits & 0xff);
    }
  }
};
constexpr Float8Table kFloat8Table;

// Columns [0, 32) (part 0) or [32, 64) (part 1) of 64 codes as BF16.
inline __m512i fp8_to_bf16(__m512i codes, int part) {
  // The interleaving below works on 16-byte lanes; this order of 8-byte pieces makes its result consecutive.
  const __m512i spread = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
  const __m512i lower = _mm512_permutex2var_epi8(_mm512_load_si512(kFloat8Table.lower), spread,
                                                 _mm512_load_si512(kFloat8Table.lower + 64));
  const __m512i magnitude = _mm512_permutex2var_epi8(_mm512_load_si512(kFloat8Table.upper), spread,
                                                     _mm512_load_si512(kFloat8Table.upper + 64));
  // magnitude | (spread & 0x80)
  const __m512i upper = _mm512_ternarylogic_epi32(magnitude, spread, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
  return part == 0 ? _mm512_unpacklo_epi8(lower, upper) : _mm512_unpackhi_epi8(lower, upper);
}

// FP8 weights become BF16, exactly, through table look-ups of bytes (VBMI).
struct DotFloat8 : DotBFloat16 {
  using Weight = Float8E4M3;
  using Decoded = DotBFloat16;
  static constexpr int kMaxTokens = kTileTokens;
  static constexpr int64_t row_ahead_bytes(int /*tokens*/) { return 2048; }
  static constexpr int kWideTokens = 0;
  static constexpr bool kDecodes = true;
  static constexpr int kStep = 64, kParts = 2;

  static Operand weight(const Weight* w, int part) {
    return reinterpret_cast<__m512bh>(fp8_to_bf16(_mm512_loadu_si512(w), part));
  }
  static __m512i load_codes(const Weight* w, int64_t columns) {
    return _mm512_maskz_loadu_epi8(columns >= 64 ? ~0ull : (1ull << columns) - 1, w);
  }
  static Operand weight_tail(const Weight* w, int part, int64_t columns) {
    return reinterpret_cast<__m512bh>(fp8_to_bf16(load_codes(w, columns), part));
  }
  // `out` has room for `columns` rounded up to 64. `ahead`: half as many bytes to fetch meanwhile, or null.
  static void decode_row(const Weight* w, int64_t columns, BFloat16* out, const char* ahead) {
    for (int64_t k = 0; k < columns; k += 64) {
      if (ahead) __builtin_prefetch(ahead + k / 2, 0, 2);
      const __m512i codes = load_codes(w + k, columns - k);
      _mm512_storeu_si512(out + k, fp8_to_bf16(codes, 0));
      _mm512_storeu_si512(out + k + 32, fp8_to_bf16(codes, 1));
    }
  }
};

// Column 4 j + p of a step is word j of part p, in weights and in activations. FP4 weights become BF16, exactly: a
// shift and a look-up of words for 32 weights.
struct DotFloat4 : DotBFloat16, Avx512Float4Codes {
  using Weight = Float4E2M1Pair;
  using Decoded = DotFloat4;
  using Avx512Float4Codes::kStep;
  static constexpr bool kGroupScales = true;
  static constexpr int kColumnsPerElement = 2;
  static constexpr bool kPacks = true;
  static constexpr int kTileTokens = kMaxTokens;
  static constexpr int kWideTokens = 0;
  static constexpr int64_t row_ahead_bytes(int /*tokens*/) { return 2048; }
  static constexpr int kParts = 4;

  static void decode(__m512i codes, const ExponentGroups& /*groups*/, int64_t /*k*/, int64_t /*columns*/,
                     __m512bh (&weight)[kParts]) {
    // Twice: the look-up reads five bits of each word, the fifth is of the next code.
    const __m256i once = _mm256_setr_epi16(0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, -0x8000,
                                           -0x4100, -0x4080, -0x4040, -0x4000, -0x3fc0, -0x3f80, -0x3f40);
    const __m512i table = _mm512_broadcast_i64x4(once);
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      weight[part] = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * part), table));
    }
  }
  static Operand activation_tail(const char* x, int64_t k, int part, int64_t columns) {
    return load_first(x + 2 * (k + 32 * part), columns / 4);
  }
  static void store_activations(const float* values, char* row, int64_t column) {
    alignas(32) uint16_t rounded[kRows];
    DotBFloat16::store_activations(values, reinterpret_cast<char*>(rounded), 0);
    uint16_t* words = reinterpret_cast<uint16_t*>(row) + column / kStep * kStep + column % kStep / 4;
    for (int n = 0; n < kRows; ++n) words[n % 4 * 32 + n / 4] = rounded[n];
  }
};

// The BF16 of five bits as a two's complement integer: a code less its zero point. All are exact.
inline __m512i differences() {
  return _mm512_set_epi16(-0x4080, -0x4000, -0x3fc0, -0x3f80, -0x3f60, -0x3f40, -0x3f20, -0x3f00, -0x3ef0, -0x3ee0,
                          -0x3ed0, -0x3ec0, -0x3eb0, -0x3ea0, -0x3e90, -0x3e80, 0x4170, 0x4160, 0x4150, 0x4140, 0x4130,
                          0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0x0000);
}

// As DotFloat4. A code less the zero point of its lane is looked up; without zero points the code, in a table of the
// codes less 8.
struct DotInt4 : DotFloat4 {
  using Weight = Int4Pair;
  using Decoded = DotInt4;
  using Groups = Int4Groups;

  static void decode(__m512i codes, const Int4Groups& groups, int64_t k, int64_t columns, __m512bh (&weight)[kParts]) {
    if (!groups.has_zero) {
      // Twice: the look-up reads five bits of each word, the fifth is of the next code.
      const __m512i table = _mm512_shuffle_i64x2(differences(), differences(), 0x33);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        weight[part] = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * part), table));
      }
      return;
    }
    // Of every byte the low and the high half: the low and the high byte of a word are a part each.
    const __m512i zero = Avx512Int4Groups::zero(groups, k, columns, 0x01010101), half = _mm512_set1_epi8(15);
    const __m512i even = _mm512_sub_epi8(_mm512_and_si512(codes, half), zero);
    const __m512i odd = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(codes, 4), half), zero);
    const __m512i parts[kParts] = {even, odd, _mm512_srli_epi16(even, 8), _mm512_srli_epi16(odd, 8)};
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      weight[part] = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(parts[part], differences()));
    }
  }
  static __m512 factor(const Int4Groups& groups, int64_t k, int64_t columns) {
    return Avx512Int4Groups::factor(groups, k, columns);
  }
};

}  // namespace

const ExpertKernels* avx512_bf16_int4_kernels(DType x_dtype) {
  return x_dtype == DType::kBFloat16 ? &kExperts<DotInt4> : avx512_int4_kernels(x_dtype);
}

const ExpertKernels* avx512_bf16_kernels(const FusedExpertsArgs& args) {
  if (args.x_dtype != DType::kBFloat16) return avx512_kernels(args);
  if (args.weight_dtype == DType::kFloat4E2M1) return &kExperts<DotFloat4>;
  return args.weight_dtype == DType::kFloat8E4M3 ? &kExperts<DotFloat8> : &kExperts<DotBFloat16>;
}

}  // namespace moeopt
