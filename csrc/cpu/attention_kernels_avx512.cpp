// Attention for avx512. Drawing: simd/attend.h.
#include "simd/attend.h"
#include "simd/formats_avx512.h"

namespace moeopt {

const AttentionKernels* avx512_attention(DType dtype) { return attention_kernels<Avx512>(dtype); }

}  // namespace moeopt
