// Products of few rows on any machine. Drawing: simd/few_rows.h.
#include "simd/few_rows.h"
#include "simd/generic.h"

namespace moeopt {

const FewRowKernels* generic_few_rows(DType dtype) { return few_row_kernels<Generic>(dtype); }

}  // namespace moeopt
