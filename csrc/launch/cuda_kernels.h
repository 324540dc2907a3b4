// Lays out and starts the CUDA kernels.
#pragma once

#include "launch/problem.h"
#include "moeopt/gate_topk.h"
#include "moeopt/skinny_gemm.h"

namespace moeopt {

// What `run_cuda` with the same arguments launches; see geometry.h.
CallLayout cuda_layout(const Problem& problem, const Variant& variant, int multiprocessors, uintptr_t buffer);

// Enqueues the call on `stream` and returns. Nothing is allocated, read back or waited for, so it can be captured in a
// CUDA graph. A launch that CUDA refuses throws std::runtime_error with the kernel's name and the reason.
void run_cuda(const Problem& problem, const Variant& variant, int multiprocessors, uintptr_t buffer, int* counters,
              uintptr_t stream);

// The gate product and top-k of few tokens (gate_topk.cuh): what `run_gate_topk` launches, and the launch. It is a
// launch like those of `run_cuda`, which may follow it on the stream with its ids and weights.
GateTopkLaunch gate_topk_layout(const GateTopkArgs& args, const RouterArgs& router);
void run_gate_topk(const GateTopkArgs& args, const RouterArgs& router, uintptr_t stream);

// The product of few tokens with a weight matrix (skinny_gemm.cuh): what `run_skinny_gemm` launches, and the launch.
SkinnyGemmLaunch skinny_gemm_layout(const SkinnyGemmArgs& args, int multiprocessors);
void run_skinny_gemm(const SkinnyGemmArgs& args, int multiprocessors, uintptr_t stream);

}  // namespace moeopt
