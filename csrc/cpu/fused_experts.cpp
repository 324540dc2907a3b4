// Routing, tasks and threads of the CPU experts; the arithmetic is in expert_kernels_*.cpp.
//
//   topk_ids -- sort --> runs of pairs by expert --> groups whose intermediate fits the cache
//
//   for each group:
//     phase 1  tasks (expert, tile of I)   x --> gate, up --> SwiGLU --> h     [pairs of the group, I]
//     ------------------------------------------------------- all threads meet
//     phase 2  tasks (tile of H)           for each expert, ascending: h --> down --> sum [T, H] += w * y
//     ------------------------------------------------------- all threads meet
//   last group, phase 2: sum --> out, rounded once
//
// Any thread may take any task: a tile of phase 1 belongs to one task, and a column of `sum` to one task that adds the
// experts in ascending order. So skewed work is balanced, and the bits do not depend on the number of threads.
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "expert_kernels.h"
#include "moeopt/fused_experts.h"
#include "routing.h"
#include "team.h"

namespace moeopt {
namespace {

// Bytes of intermediate per group: small enough for the last-level cache slice of a few cores, large enough to make the
// two barriers per group negligible.
constexpr int64_t kGroupBytes = 1 << 20;
constexpr int64_t kAlignment = 64;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// A buffer that grows and is kept: a new one per call would cost page faults every time.
class Scratch {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      data_.reset();
      size_ = 0;
      data_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, round_up(bytes, kAlignment))));
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(char* pointer) const { std::free(pointer); }
  };
  std::unique_ptr<char, Free> data_;
  int64_t size_ = 0;
};

// Rows per task: the largest tile that still leaves every thread several tasks to balance with. A thread alone has
// nobody to balance with, and in short tiles few tokens read their weights as streams of a few lines.
int64_t tile_rows(int64_t rows, int64_t parallel_tiles, int threads) {
  const int64_t tasks = threads == 1 ? 1 : 8 * threads;
  for (int64_t tile = kMaxTaskRows; tile > kSizeMultiple; tile /= 2) {
    if (ceil_div(rows, tile) * parallel_tiles >= tasks) return tile;
  }
  return kSizeMultiple;
}

// Tokens of one pass. More would only cost memory: with this many, each read of an expert's weights serves dozens of
// tokens.
constexpr int64_t kPassTokens = 2048;

// The part of `args` for tokens [begin, end).
FusedExpertsArgs slice_tokens(const FusedExpertsArgs& args, int64_t begin, int64_t end) {
  const int64_t x_bytes = args.x_dtype == DType::kFloat32 ? 4 : 2, id_bytes = args.ids_are_int64 ? 8 : 4;
  FusedExpertsArgs part = args;
  part.num_tokens = end - begin;
  part.x = static_cast<const char*>(args.x) + begin * args.x_stride * x_bytes;
  part.out = static_cast<char*>(args.out) + begin * args.out_stride * x_bytes;
  part.topk_weights = args.topk_weights + begin * args.top_k;
  part.topk_ids = static_cast<const char*>(args.topk_ids) + begin * args.top_k * id_bytes;
  return part;
}

void run_pass(const FusedExpertsArgs& args, const ExpertKernels& kernels, const Routing& routing) {
  const int64_t T = args.num_tokens, H = args.hidden_size, I = args.intermediate_size;
  const int64_t h_row_bytes = kernels.h_row_bytes(args);
  const int threads = threads_for(static_cast<int64_t>(routing.pairs.size()) * 3 * H * I);
  const int64_t packed_row_bytes = round_up(kernels.packed_x_row_bytes(args), kAlignment);
  const int64_t packed_bytes = round_up(T * packed_row_bytes, kAlignment);
  const int64_t h_bytes = round_up(routing.max_group_pairs * h_row_bytes, kAlignment);
  // One line more than H: tokens a power of two apart would compete for the same lines of the cache.
  const int64_t sum_stride = round_up(H, 16) + 16;
  const int64_t sum_bytes = T * sum_stride * static_cast<int64_t>(sizeof(float));
  const int64_t thread_bytes = round_up(kernels.scratch_bytes(args), kAlignment);

  static thread_local Scratch scratch;
  char* memory = scratch.reserve(packed_bytes + h_bytes + sum_bytes + threads * thread_bytes);
  char* packed = memory;
  char* thread_memory = memory + packed_bytes + h_bytes + sum_bytes;
  const int64_t element_bytes = args.x_dtype == DType::kFloat32 ? 4 : 2;

  LayerBuffers layer;
  layer.x = packed_row_bytes ? packed : static_cast<const char*>(args.x);
  layer.x_row_bytes = packed_row_bytes ? packed_row_bytes : args.x_stride * element_bytes;
  layer.h = memory + packed_bytes;
  layer.h_row_bytes = h_row_bytes;
  layer.sum = reinterpret_cast<float*>(memory + packed_bytes + h_bytes);
  layer.sum_stride = sum_stride;
  layer.pairs = routing.pairs.data();

  const int64_t down_tile = tile_rows(H, 1, threads);
  const int64_t down_tasks = ceil_div(H, down_tile);

#pragma omp parallel num_threads(threads)
  {
    char* mine = thread_memory + omp_get_thread_num() * thread_bytes;
    if (packed_row_bytes) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < T; ++t) kernels.pack_x_row(args, t, packed + t * packed_row_bytes);
    }
    for (const Group& group : routing.groups) {
      LayerBuffers buffers = layer;
      buffers.h_first_pair = group.pair_begin;
      const int64_t runs = group.run_end - group.run_begin;
      const int64_t tile = tile_rows(I, runs, threads);
      const int64_t tiles = ceil_div(I, tile);
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < runs * tiles; ++task) {
        const int64_t begin = task % tiles * tile;
        kernels.gate_up(args, buffers, routing.runs[group.run_begin + task / tiles], begin, std::min(begin + tile, I),
                        mine);
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < down_tasks; ++task) {
        const int64_t begin = task * down_tile, end = std::min(begin + down_tile, H);
        if (&group == &routing.groups.front()) {
          for (int64_t t = 0; t < T; ++t) {
            std::fill(layer.sum + t * sum_stride + begin, layer.sum + t * sum_stride + end, 0.0f);
          }
        }
        for (int64_t r = group.run_begin; r < group.run_end; ++r) {
          const ExpertRun* next = r + 1 < group.run_end ? &routing.runs[r + 1] : nullptr;
          kernels.down(args, buffers, routing.runs[r], next, begin, end, mine);
        }
        if (&group == &routing.groups.back()) kernels.store(args, buffers, begin, end);
      }
    }
  }
}

}  // namespace

Isa best_isa() {
#ifdef MOEOPT_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) return Isa::kAvx512Bf16;
  if (avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kGeneric;
}

const char* isa_name(Isa isa) {
  static constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16"};
  return kNames[static_cast<int>(isa)];
}

const ExpertKernels* kernels_for(const FusedExpertsArgs& args, Isa isa) {
#ifdef MOEOPT_X86
  switch (isa) {
    case Isa::kAvx512Bf16: return avx512_bf16_kernels(args);
    case Isa::kAvx512: return avx512_kernels(args);
    case Isa::kAvx2: return avx2_kernels(args);
    case Isa::kGeneric: break;
  }
#else
  (void)isa;
#endif
  return generic_kernels(args);
}

bool fused_experts_cpu(const FusedExpertsArgs& args, Isa isa, RoutingError* error) {
  return run_experts(args, *kernels_for(args, isa), error);
}

bool run_experts(const FusedExpertsArgs& args, const ExpertKernels& kernels, RoutingError* error) {
  const int64_t max_pairs = std::max<int64_t>(1, kGroupBytes / kernels.h_row_bytes(args));
  // All of the routing first: nothing is written if any of it is wrong.
  std::vector<FusedExpertsArgs> passes;
  std::vector<Routing> routings;
  for (int64_t begin = 0; begin < args.num_tokens; begin += kPassTokens) {
    passes.push_back(slice_tokens(args, begin, std::min(begin + kPassTokens, args.num_tokens)));
    routings.emplace_back();
    if (!sort_routing(passes.back(), max_pairs, &routings.back(), error)) {
      error->token += begin;
      return false;
    }
  }
  for (size_t i = 0; i < passes.size(); ++i) run_pass(passes[i], kernels, routings[i]);
  return true;
}

}  // namespace moeopt
