// Products of few rows for AVX-512. Drawing: simd/few_rows.h.
#include "simd/few_rows.h"
#include "simd/formats_avx512.h"

namespace moeopt {

const FewRowKernels* avx512_few_rows(DType dtype) { return few_row_kernels<Avx512>(dtype); }

}  // namespace moeopt
