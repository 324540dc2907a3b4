// Exclusive prefix sum over the threads of a block.
#pragma once

#include "moeopt/device.cuh"

namespace moeopt {

// Returns the sum of `value` over the threads before this one; sets `total` to the sum over all 32 kWarps threads.
// `warp_sums`: kWarps ints of shared memory, free again after the next bar_sync.
template <int kWarps>
MOEOPT_DEVICE int exclusive_sum(int value, int* warp_sums, int& total) {
  const int inclusive = warp_inclusive_sum(value), warp = thread_index() / 32;
  if (thread_index() % 32 == 31) warp_sums[warp] = inclusive;
  bar_sync();
  int before = 0;
  total = 0;
  MOEOPT_UNROLL
  for (int w = 0; w < kWarps; ++w) {
    const int sum = warp_sums[w];
    before += w < warp ? sum : 0;
    total += sum;
  }
  return before + inclusive - value;
}

}  // namespace moeopt
