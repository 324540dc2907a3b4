// Attention on any machine. Drawing: simd/attend.h.
#include "simd/attend.h"
#include "simd/generic.h"

namespace moeopt {

const AttentionKernels* generic_attention(DType dtype) { return attention_kernels<Generic>(dtype); }

}  // namespace moeopt
