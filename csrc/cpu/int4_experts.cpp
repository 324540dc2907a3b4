// INT4 experts: the tasks and threads of fused_experts.cpp, the formats of four bits with other tables and factors.
#include "int4_experts.h"

#include "expert_kernels.h"

namespace moeopt {
namespace {

const ExpertKernels* int4_kernels_for(DType x_dtype, Isa isa) {
#ifdef MOEOPT_X86
  switch (isa) {
    case Isa::kAvx512Bf16: return avx512_bf16_int4_kernels(x_dtype);
    case Isa::kAvx512: return avx512_int4_kernels(x_dtype);
    case Isa::kAvx2: return avx2_int4_kernels(x_dtype);
    case Isa::kGeneric: break;
  }
#else
  (void)isa;
#endif
  return generic_int4_kernels(x_dtype);
}

}  // namespace

bool int4_experts_cpu(const FusedExpertsArgs& args, const Int4Scales& w13, const Int4Scales& w2, Isa isa,
                      RoutingError* error) {
  FusedExpertsArgs int4_args = args;
  int4_args.scale_kind = ScaleKind::kNone;
  int4_args.w13_exponents = reinterpret_cast<const uint8_t*>(&w13);
  int4_args.w2_exponents = reinterpret_cast<const uint8_t*>(&w2);
  return run_experts(int4_args, *int4_kernels_for(args.x_dtype, isa), error);
}

}  // namespace moeopt
