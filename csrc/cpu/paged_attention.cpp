// Tasks and threads of attention on the CPU; the arithmetic is in attention_kernels_*.cpp.
//
//   phase 1  tasks (sequence, span of its keys)                   --> partial sums
//   --------------------------------------------------------------- all threads meet
//   phase 2  tasks (sequence, query head)                         partial sums --> out, rounded once
//
// With few of them a task is one key/value head. Spans are cut at fixed keys, so long contexts are shared among threads
// and the bits do not depend on their number.
#include "paged_attention.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "attention_kernels.h"
#include "number_formats.h"
#include "team.h"

namespace moeopt {
namespace {

constexpr int64_t kSpanKeys = 512;     // chosen: some microseconds of work, and few partial sums to join
constexpr int64_t kTasksOfThread = 4;  // chosen: enough to balance
constexpr int64_t kPadFloats = 16;     // threads do not write to one line of the cache

const AttentionKernels* kernels_of(DType dtype, Isa isa) {
#ifdef MOEOPT_X86
  switch (isa) {
    case Isa::kAvx512Bf16:
    case Isa::kAvx512: return avx512_attention(dtype);
    case Isa::kAvx2: return avx2_attention(dtype);
    case Isa::kGeneric: break;
  }
#else
  (void)isa;
#endif
  return generic_attention(dtype);
}

bool is_sound(const PagedAttentionArgs& args, PageError* error) {
  for (int64_t s = 0; s < args.num_sequences; ++s) {
    const int64_t length = args.context_lengths[s], most = args.table_width * args.block_size;
    if (length < 0 || length > most) {
      *error = {true, s, length, most};
      return false;
    }
    const int32_t* table = args.block_tables + s * args.table_stride;
    for (int64_t n = 0; n * args.block_size < length; ++n) {
      if (table[n] < 0 || table[n] >= args.num_blocks) {
        *error = {false, s, table[n], args.num_blocks};
        return false;
      }
    }
  }
  return true;
}

// As attend() of simd/attend.h divides it: scores of two heads, then for each head query and sums, largest and total.
int64_t scratch_floats(const PagedAttentionArgs& args, int64_t lanes) {
  const int64_t padded = (args.head_size + lanes - 1) / lanes * lanes;
  return 2 * kTileKeys + args.num_heads * (2 * padded + 2) + kPadFloats;
}

// Adds up the spans of one query head, whose largest scores become their weights.
template <typename T>
void join(float* partials, int64_t count, int64_t stride, int64_t head_size, T* out) {
  float largest = -INFINITY, total = 0.0f;
  for (int64_t n = 0; n < count; ++n) largest = std::max(largest, partials[n * stride]);
  for (int64_t n = 0; n < count; ++n) {
    partials[n * stride] = count == 1 ? 1.0f : std::exp(partials[n * stride] - largest);
    total += partials[n * stride] * partials[n * stride + 1];
  }
  for (int64_t k = 0; k < head_size; ++k) {
    float sum = 0.0f;
    for (int64_t n = 0; n < count; ++n) sum += partials[n * stride] * partials[n * stride + 2 + k];
    from_float(count ? sum / total : 0.0f, out + k);
  }
}

}  // namespace

bool paged_attention_cpu(const PagedAttentionArgs& args, Isa isa, PageError* error) {
  if (!is_sound(args, error)) return false;
  const AttentionKernels& kernels = *kernels_of(args.dtype, isa);
  const int64_t shared = args.num_heads / args.num_kv_heads;
  int64_t keys = 0, num_spans = 0;
  for (int64_t s = 0; s < args.num_sequences; ++s) {
    keys += args.context_lengths[s];
    num_spans += (args.context_lengths[s] + kSpanKeys - 1) / kSpanKeys;
  }
  const int threads = threads_for(2 * keys * args.num_heads * args.head_size);
  const int64_t together = num_spans >= kTasksOfThread * threads ? args.num_kv_heads : 1;
  std::vector<KeySpan> spans;
  std::vector<int64_t> first_span;  // of each sequence and `together` key/value heads, and the end of the last
  for (int64_t s = 0; s < args.num_sequences; ++s) {
    for (int64_t head = 0; head < args.num_kv_heads; head += together) {
      first_span.push_back(static_cast<int64_t>(spans.size()));
      for (int64_t begin = 0; begin < args.context_lengths[s]; begin += kSpanKeys) {
        spans.push_back({s, head, together, begin, std::min(begin + kSpanKeys, args.context_lengths[s])});
      }
    }
  }
  first_span.push_back(static_cast<int64_t>(spans.size()));

  const int64_t stride = partial_stride(args), thread_floats = scratch_floats(args, kernels.lanes);
  const int64_t num_tasks = static_cast<int64_t>(spans.size()), task_floats = together * shared * stride;
  const std::unique_ptr<float[]> scratch(new float[threads * thread_floats]);
  const std::unique_ptr<float[]> partials(new float[num_tasks * task_floats]);

#pragma omp parallel num_threads(threads)
  {
    float* mine = scratch.get() + omp_get_thread_num() * thread_floats;
#pragma omp for schedule(dynamic, 1)
    for (int64_t n = 0; n < num_tasks; ++n) {
      const KeySpan* next = n + threads < num_tasks ? &spans[n + threads] : nullptr;
      kernels.attend(args, spans[n], next, mine, &partials[n * task_floats]);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < args.num_sequences * args.num_heads; ++row) {
      const int64_t s = row / args.num_heads, head = row % args.num_heads;
      const int64_t group = (s * args.num_kv_heads + head / shared) / together, first = first_span[group];
      float* found = partials.get() + first * task_floats + head % (together * shared) * stride;
      const int64_t count = first_span[group + 1] - first, place = s * args.out_stride + head * args.out_head_stride;
      const auto into = [&](auto* out) { join(found, count, task_floats, args.head_size, out + place); };
      switch (args.dtype) {
        case DType::kFloat32: into(static_cast<float*>(args.out)); break;
        case DType::kBFloat16: into(static_cast<BFloat16*>(args.out)); break;
        default: into(static_cast<Float16*>(args.out));
      }
    }
  }
  return true;
}

}  // namespace moeopt
