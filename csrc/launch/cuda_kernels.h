// Starting the CUDA kernels: integer lists in (see problem.h and arguments.h), nothing of CUDA in the interface.
//
// Every function enqueues on `stream` and returns; nothing is allocated, read back or waited for, so all of them can be
// captured in a CUDA graph. A launch that CUDA refuses throws std::runtime_error with the kernel's name and the reason.
#pragma once

#include <cstdint>
#include <vector>

namespace moeopt {

using Values = std::vector<int64_t>;

// How the small-batch kernel is started.
enum class DecodeStart : int32_t {
  kCooperative = 0,  // one launch; CUDA guarantees that all blocks are resident
  kPlain = 1,        // one launch, residency checked against the occupancy; nothing else may run such a kernel beside it
  kChained = 2,      // two launches, the second started early (programmatic dependent launch)
  kSeparate = 3,     // two launches in stream order
};

// The small-batch kernel: router or top-k ids to combined output.
void run_decode(const Values& problem, const Values& workspace, const Values& geometry, uintptr_t stream,
                DecodeStart start);

// Router (with logits), routing, token preparation, both grouped GEMMs, combine.
void run_grouped(const Values& problem, const Values& workspace, const Values& geometry, uintptr_t stream);

// Blocks of the small-batch kernel that fit one multiprocessor of the current device with `geometry`.
int decode_blocks_per_multiprocessor(const Values& problem, const Values& geometry);

}  // namespace moeopt
