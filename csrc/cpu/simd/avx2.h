// AVX2 with FMA and F16C: 8 FP32 lanes. Internal linkage: see number_formats.h.
#pragma once

#include <immintrin.h>

#include "../number_formats.h"
#include "register_tile.h"

namespace moeopt {
namespace {

struct Avx2 {
  using Vec = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kMaxTokens = 3;  // 12 sums, 3 activations, 1 row: all 16 registers
  static constexpr int kTileTokens = kMaxTokens;
  static constexpr int kWideTokensOfFp16 = 0;
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static Vec set1(float v) { return _mm256_set1_ps(v); }
  static Vec fmadd(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static Vec round(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // v in [0.5, 2), the result a normal number: adding to the exponent is enough.
  static Vec times_power_of_two(Vec v, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), exponent));
  }
  static Vec load_fp16(const Float16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Vec load_bf16(const BFloat16* p) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  }
  // Four sums of lanes: pairs, quarters, then halves.
  static void store_sums(const Vec* v, float* out) {
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
  }
  template <typename X>
  static void store_rounded(const float* values, X* out) {
    for (int n = 0; n < kRows; ++n) from_float(values[n], out + n);
  }
};

}  // namespace
}  // namespace moeopt
