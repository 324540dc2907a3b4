// How many threads share a piece of work.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace moeopt {

// The caller's threads, but each with at least this many products: some microseconds, about what it takes to wake a
// waiting thread and to wait for it. Chosen by measurement, with waiting threads that sleep.
constexpr int64_t kLeastProducts = 1 << 18;

inline int threads_for(int64_t products) {
  return static_cast<int>(std::clamp<int64_t>(products / kLeastProducts, 1, omp_get_max_threads()));
}

}  // namespace moeopt
