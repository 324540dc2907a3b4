// Expanding 2:4 sparse rows with AVX-512 VBMI2, which expands words: 32 columns per instruction.
#include <immintrin.h>

#include <cstring>

#include "sparse_experts.h"

namespace moeopt {

void expand_row_avx512_vbmi2(const uint16_t* values, const uint8_t* mask, int64_t columns, uint16_t* row) {
  int64_t k = 0;
  for (; k + 32 <= columns; k += 32) {
    __mmask32 kept;
    std::memcpy(&kept, mask + k / 8, sizeof(kept));
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + k / 2));
    _mm512_storeu_si512(row + k, _mm512_maskz_expand_epi16(kept, _mm512_castsi256_si512(words)));
  }
  if (k < columns) {
    __mmask16 kept;
    std::memcpy(&kept, mask + k / 8, sizeof(kept));
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + k / 2));
    const __m256i expanded = _mm256_maskz_expand_epi16(kept, _mm256_castsi128_si256(words));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + k), expanded);
  }
}

}  // namespace moeopt
