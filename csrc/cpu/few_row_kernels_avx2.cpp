// Products of few rows for AVX2 with FMA and F16C. Drawing: simd/few_rows.h.
#include "simd/avx2.h"
#include "simd/few_rows.h"

namespace moeopt {

const FewRowKernels* avx2_few_rows(DType dtype) { return few_row_kernels<Avx2>(dtype); }

}  // namespace moeopt
