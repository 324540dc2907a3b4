#include "token_rows.h"

#include <omp.h>

#include <cmath>
#include <cstring>

#include "team.h"

namespace moeopt {
namespace {

constexpr int64_t kLanes = 16;              // partial sums: the compiler makes registers of them
constexpr int64_t kProductsOfElement = 16;  // that take as long as an element takes here

float mean_of_squares(const float* x, int64_t size) {
  float sums[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) {
    for (int64_t n = 0; n < kLanes; ++n) sums[n] += x[k + n] * x[k + n];
  }
  for (; k < size; ++k) sums[k % kLanes] += x[k] * x[k];
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t n = 0; n < half; ++n) sums[n] += sums[n + half];
  }
  return sums[0] / static_cast<float>(size);
}

// `x` may be `out`.
void normalize(const float* x, const float* weight, float eps, int64_t size, float* out) {
  const float factor = 1.0f / std::sqrt(mean_of_squares(x, size) + eps);
  for (int64_t k = 0; k < size; ++k) out[k] = weight[k] * (x[k] * factor);
}

void turn(float* x, const float* cos, const float* sin, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t k = 0; k < half; ++k) {
    const float first = x[k], second = x[k + half];
    x[k] = first * cos[k] - second * sin[k];
    x[k + half] = second * cos[k + half] + first * sin[k + half];
  }
}

}  // namespace

void add_rms_norm_cpu(int64_t num_tokens, int64_t size, Rows<const float> x, Rows<const float> residual,
                      const float* weight, float eps, Rows<float> sum, Rows<float> out) {
#pragma omp parallel for num_threads(threads_for(num_tokens * size * kProductsOfElement)) schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) {
    const float *one = x.row(t), *other = residual.row(t);
    float* both = sum.row(t);
    for (int64_t k = 0; k < size; ++k) both[k] = one[k] + other[k];
    normalize(both, weight, eps, size, out.row(t));
  }
}

void turn_heads_cpu(int64_t num_tokens, const Heads& heads, Rows<float> x, Rows<const float> cos,
                    Rows<const float> sin) {
  const int64_t count = heads.num_heads + heads.num_kv_heads, size = heads.head_size;
#pragma omp parallel for num_threads(threads_for(num_tokens * count * size * kProductsOfElement)) schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t head = 0; head < count; ++head) {
      float* row = x.row(t) + head * size;
      const float* weight = head < heads.num_heads ? heads.q_weight : heads.k_weight;
      if (weight) normalize(row, weight, heads.eps, size, row);
      turn(row, cos.row(t), sin.row(t), size);
    }
  }
}

bool store_rows_cpu(int64_t num_tokens, int64_t row_bytes, Rows<const char> source, const int64_t* slots,
                    int64_t num_slots, char* target) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (slots[t] >= num_slots) return false;
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (slots[t] >= 0) std::memcpy(target + slots[t] * row_bytes, source.row(t), row_bytes);
  }
  return true;
}

}  // namespace moeopt
