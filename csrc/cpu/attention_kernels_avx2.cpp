// Attention for AVX2 with FMA and F16C. Drawing: simd/attend.h.
#include "simd/attend.h"
#include "simd/avx2.h"

namespace moeopt {

const AttentionKernels* avx2_attention(DType dtype) { return attention_kernels<Avx2>(dtype); }

}  // namespace moeopt
