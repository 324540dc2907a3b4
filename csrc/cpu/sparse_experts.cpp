// Sparse experts: 16 rows at a time are expanded into a thread's scratch memory and multiplied by the dense kernels.
//
//   values, mask of 16 rows  -- expand -->  16 dense BF16 rows  -- dense gate_up / down -->  as in fused_experts.cpp
//   [16, K / 2]  [16, K / 8]                (a few KiB each, they stay in L2)
//
// Memory gives 9/16 of the bytes of dense BF16. Expanding is exact and the order of all sums is the dense kernels' own:
// the result is that of the dense weights bit for bit, for any number of threads.
#include "sparse_experts.h"

#ifdef MOEOPT_X86
#include <immintrin.h>
#endif

#include <cstring>

#include "expert_kernels.h"

namespace moeopt {
namespace {

constexpr int64_t kUnitRows = kSizeMultiple;
// Rows that start at different offsets from a power of two do not compete for the same lines of a cache.
constexpr int64_t kRowPad = 32;

// Writes one row with its zeros. `columns` is a multiple of kSizeMultiple. Reads columns / 2 values whatever the mask.
using ExpandRow = void (*)(const uint16_t* values, const uint8_t* mask, int64_t columns, uint16_t* row);

// One weight tensor. FusedExpertsArgs::w13 and w2 point to one of these while the functions below are the kernels.
struct SparseWeight {
  const uint16_t* values;
  const uint8_t* mask;
  int64_t rows, columns;  // of an expert
  ExpandRow expand;
  const ExpertKernels* dense;

  // Writes rows [first, first + kUnitRows) of an expert, `stride` elements apart.
  void expand_unit(int64_t expert, int64_t first, int64_t stride, uint16_t* out) const {
    for (int64_t n = 0; n < kUnitRows; ++n) {
      const int64_t row = expert * rows + first + n;
      expand(values + row * (columns / 2), mask + row * (columns / 8), columns, out + n * stride);
    }
  }
};

const SparseWeight& sparse(const void* weight) { return *static_cast<const SparseWeight*>(weight); }

int64_t row_stride(const FusedExpertsArgs& args) {
  const int64_t longest = args.hidden_size > args.intermediate_size ? args.hidden_size : args.intermediate_size;
  return (longest + 31) / 32 * 32 + kRowPad;
}

// A unit of gate rows and one of up rows.
int64_t expanded_bytes(const FusedExpertsArgs& args) {
  return 2 * kUnitRows * row_stride(args) * static_cast<int64_t>(sizeof(uint16_t));
}

int64_t scratch_bytes(const FusedExpertsArgs& args) {
  return expanded_bytes(args) + sparse(args.w13).dense->scratch_bytes(args);
}

// The address of a tensor's row 0 when row `first` lies at `rows`: the dense kernels count from there. As a number,
// because there is no memory at row 0.
const void* row_zero(const uint16_t* rows, int64_t first, int64_t stride) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(rows) - first * stride * sizeof(uint16_t));
}

void gate_up(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, int64_t begin,
             int64_t end, char* scratch) {
  const SparseWeight& w13 = sparse(args.w13);
  const int64_t stride = row_stride(args);
  uint16_t* rows = reinterpret_cast<uint16_t*>(scratch);
  FusedExpertsArgs unit = args;
  unit.w13_expert_stride = 0;
  unit.w13_row_stride = stride;
  unit.intermediate_size = kUnitRows;  // by so many rows the up rows follow the gate rows
  for (int64_t i = begin; i < end; i += kUnitRows) {
    w13.expand_unit(run.expert, i, stride, rows);
    w13.expand_unit(run.expert, args.intermediate_size + i, stride, rows + kUnitRows * stride);
    unit.w13 = row_zero(rows, i, stride);
    w13.dense->gate_up(unit, buffers, run, i, i + kUnitRows, scratch + expanded_bytes(args));
  }
}

void down(const FusedExpertsArgs& args, const LayerBuffers& buffers, const ExpertRun& run, const ExpertRun* /*next*/,
          int64_t begin, int64_t end, char* scratch) {
  const SparseWeight& w2 = sparse(args.w2);
  const int64_t stride = row_stride(args);
  uint16_t* rows = reinterpret_cast<uint16_t*>(scratch);
  FusedExpertsArgs unit = args;
  unit.w2_expert_stride = 0;
  unit.w2_row_stride = stride;
  for (int64_t j = begin; j < end; j += kUnitRows) {
    w2.expand_unit(run.expert, j, stride, rows);
    unit.w2 = row_zero(rows, j, stride);
    w2.dense->down(unit, buffers, run, nullptr, j, j + kUnitRows, scratch + expanded_bytes(args));
  }
}

void expand_row_generic(const uint16_t* values, const uint8_t* mask, int64_t columns, uint16_t* row) {
  for (int64_t k = 0; k < columns; k += 4) {
    const int bits = mask[k / 8] >> (k % 8) & 15;
    int64_t next = k / 2;
    for (int n = 0; n < 4; ++n) {
      const bool kept = (bits >> n & 1) && next < k / 2 + 2;
      row[k + n] = kept ? values[next++] : 0;
    }
  }
}

#ifdef MOEOPT_X86
// Words are widened first: AVX-512 F and BW expand dwords only.
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void expand_row_avx512(const uint16_t* values,
                                                                                     const uint8_t* mask,
                                                                                     int64_t columns, uint16_t* row) {
  for (int64_t k = 0; k < columns; k += 16) {
    __mmask16 kept;
    std::memcpy(&kept, mask + k / 8, sizeof(kept));
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + k / 2));
    const __m512i dwords = _mm512_castsi256_si512(_mm256_cvtepu16_epi32(words));
    const __m256i expanded = _mm512_cvtepi32_epi16(_mm512_maskz_expand_epi32(kept, dwords));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + k), expanded);
  }
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2"))) void expand_row_avx512_vbmi2(
    const uint16_t* values, const uint8_t* mask, int64_t columns, uint16_t* row) {
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
#endif

ExpandRow expand_row_for(Isa isa) {
#ifdef MOEOPT_X86
  if (isa >= Isa::kAvx512) {
    return __builtin_cpu_supports("avx512vbmi2") ? expand_row_avx512_vbmi2 : expand_row_avx512;
  }
#else
  (void)isa;
#endif
  return expand_row_generic;
}

}  // namespace

bool sparse_experts_cpu(const FusedExpertsArgs& args, const SparseMasks& masks, Isa isa, RoutingError* error) {
  const ExpertKernels* dense = kernels_for(args, isa);
  const ExpandRow expand = expand_row_for(isa);
  const int64_t H = args.hidden_size, I = args.intermediate_size;
  const SparseWeight w13{static_cast<const uint16_t*>(args.w13), masks.w13_mask, 2 * I, H, expand, dense};
  const SparseWeight w2{static_cast<const uint16_t*>(args.w2), masks.w2_mask, H, I, expand, dense};
  FusedExpertsArgs sparse_args = args;
  sparse_args.w13 = &w13;
  sparse_args.w2 = &w2;
  ExpertKernels kernels = *dense;
  kernels.scratch_bytes = scratch_bytes;
  kernels.gate_up = gate_up;
  kernels.down = down;
  return run_experts(sparse_args, kernels, error);
}

}  // namespace moeopt
