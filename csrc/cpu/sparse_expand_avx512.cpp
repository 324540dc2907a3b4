// Expanding 2:4 sparse rows with AVX-512 F and BW: words are widened, since only dwords can be expanded there.
#include <immintrin.h>

#include <cstring>

#include "sparse_experts.h"

namespace moeopt {

void expand_row_avx512(const uint16_t* values, const uint8_t* mask, int64_t columns, uint16_t* row) {
  for (int64_t k = 0; k < columns; k += 16) {
    __mmask16 kept;
    std::memcpy(&kept, mask + k / 8, sizeof(kept));
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + k / 2));
    const __m512i dwords = _mm512_castsi256_si512(_mm256_cvtepu16_epi32(words));
    const __m256i expanded = _mm512_cvtepi32_epi16(_mm512_maskz_expand_epi32(kept, dwords));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + k), expanded);
  }
}

}  // namespace moeopt
