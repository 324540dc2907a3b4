// What a decoder layer does with the rows of its tokens between the products: small work that takes torch a dozen
// passes over memory and a dozen calls.
#pragma once

#include <cstdint>

namespace moeopt {

// Strides count elements; a row is contiguous.
template <typename T>
struct Rows {
  T* first;
  int64_t stride;

  T* row(int64_t n) const { return first + n * stride; }
};

// sum[t] = x[t] + residual[t]; out[t] = weight * sum[t] / sqrt(mean(sum[t]^2) + eps).
void add_rms_norm_cpu(int64_t num_tokens, int64_t size, Rows<const float> x, Rows<const float> residual,
                      const float* weight, float eps, Rows<float> sum, Rows<float> out);

// The heads of a token, which lie side by side: the queries' [0, num_heads), then the keys'.
struct Heads {
  int64_t num_heads, num_kv_heads, head_size;
  // Of the norm of each head, [head_size]; null: none.
  const float* q_weight;
  const float* k_weight;
  float eps;
};

// Normalizes each head, then turns it in place: x * cos + (-second half, first half) * sin.
void turn_heads_cpu(int64_t num_tokens, const Heads& heads, Rows<float> x, Rows<const float> cos,
                    Rows<const float> sin);

// target[slots[t]] = source[t], rows of `row_bytes`; a negative slot: not stored. False, with nothing written: a slot
// is not below num_slots.
bool store_rows_cpu(int64_t num_tokens, int64_t row_bytes, Rows<const char> source, const int64_t* slots,
                    int64_t num_slots, char* target);

}  // namespace moeopt
