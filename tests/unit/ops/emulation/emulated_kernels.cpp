// The kernels of csrc/include/moeopt, run thread by thread on the CPU, behind a C interface for ctypes.
//
// Every function returns 0, or 1 with a message: a deadlock, a misaligned access, a barrier used wrongly.
#include <cmath>
#include <cstdio>

#include "emulated_device.h"
#include "launch/problem.h"
#include "moeopt/flash_dmoe_decode.cuh"

using namespace moeopt;

namespace {

int report(const std::string& message, char* error, int capacity) {
  std::snprintf(error, static_cast<size_t>(capacity), "%s", message.c_str());
  return message.empty() ? 0 : 1;
}

template <int kWeightBytes, int kColumnBlocks>
std::string run_decode(const DecodeArgs& args, DecodePhase phase, int grid, int shared_bytes, uint64_t seed) {
  return emulation::launch(grid, kDecodeThreads, static_cast<size_t>(shared_bytes), seed, [&] {
    if (phase == DecodePhase::kBoth) flash_dmoe_decode_kernel<kWeightBytes, kColumnBlocks, DecodePhase::kBoth>(args);
    if (phase == DecodePhase::kUp) flash_dmoe_decode_kernel<kWeightBytes, kColumnBlocks, DecodePhase::kUp>(args);
    if (phase == DecodePhase::kDown) flash_dmoe_decode_kernel<kWeightBytes, kColumnBlocks, DecodePhase::kDown>(args);
  });
}

}  // namespace

extern "C" {

// workspace: {h, y, slot_arrivals, tile_arrivals, block_arrivals}; geometry: {column blocks, stages, w13 chunk bytes,
// w2 chunk bytes, shared bytes, grid}; split: two launches instead of one.
int emulate_decode(const int64_t* values, int64_t count, void* const* workspace, const int32_t* geometry, int split,
                   uint64_t seed, char* error, int capacity) {
  const Problem problem = problem_from_values(values, count);
  DecodeArgs args{};
  args.moe = problem.moe;
  args.router = problem.router;
  args.h = static_cast<uint16_t*>(workspace[0]);
  args.y = static_cast<float*>(workspace[1]);
  args.slot_arrivals = static_cast<int*>(workspace[2]);
  args.tile_arrivals = static_cast<int*>(workspace[3]);
  args.block_arrivals = static_cast<int*>(workspace[4]);
  args.num_stages = geometry[1];
  args.w13_chunk_bytes = geometry[2];
  args.w2_chunk_bytes = geometry[3];
  const auto run = [&](DecodePhase phase) {
    const bool fp8 = problem.moe.weight_dtype == DType::kFloat8E4M3;
    const auto entry = fp8 ? (geometry[0] == 1 ? run_decode<1, 1> : run_decode<1, 2>)
                           : (geometry[0] == 1 ? run_decode<2, 1> : run_decode<2, 2>);
    return entry(args, phase, geometry[5], geometry[4], seed);
  };
  if (!split) return report(run(DecodePhase::kBoth), error, capacity);
  const std::string first = run(DecodePhase::kUp);
  return report(first.empty() ? run(DecodePhase::kDown) : first, error, capacity);
}

}  // extern "C"
