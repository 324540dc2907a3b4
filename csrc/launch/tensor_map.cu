#include <string>

#include "launch/launch.cuh"

namespace moeopt {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  check_cuda(status, "cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error("cuTensorMapEncodeTiled: not in this driver, expected CUDA 12.0 or newer");
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap encode_tensor_map(const WeightView& view) {
  static const Encode encode = find_encoder();
  CUtensorMap map;
  cuuint64_t sizes[3], strides[2];
  cuuint32_t box[3];
  const cuuint32_t steps[3] = {1, 1, 1};
  for (int d = 0; d < 3; ++d) {
    sizes[d] = static_cast<cuuint64_t>(view.sizes[d]);
    box[d] = static_cast<cuuint32_t>(view.box[d]);
    if (d > 0) strides[d - 1] = static_cast<cuuint64_t>(view.strides[d]);
  }
  const CUresult status =
      encode(&map, view.element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
             const_cast<unsigned char*>(view.base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B,
             view.with_neighbours ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(status)) +
                             " for sizes " + std::to_string(view.sizes[0]) + " x " + std::to_string(view.sizes[1]) +
                             " x " + std::to_string(view.sizes[2]) + ", strides " + std::to_string(view.strides[1]) +
                             ", " + std::to_string(view.strides[2]) + " bytes (multiples of 16 expected)");
  }
  return map;
}

}  // namespace moeopt
