// Any machine, with vectors of the compiler: 4 FP32 lanes. Internal linkage: see number_formats.h.
#pragma once

#include <math.h>

#include <cstring>

#include "../number_formats.h"

namespace moeopt {
namespace {

struct Generic {
  typedef float Vec __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  template <typename Element>
  static Vec each(Element element) {
    Vec v;
    for (int n = 0; n < kLanes; ++n) v[n] = element(n);
    return v;
  }
  static Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static Vec load_bf16(const BFloat16* p) {
    return each([p](int n) { return to_float(p[n]); });
  }
  static Vec load_fp16(const Float16* p) {
    return each([p](int n) { return to_float(p[n]); });
  }
  static void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
  static Vec set1(float v) { return Vec{v, v, v, v}; }
  static Vec fmadd(Vec a, Vec b, Vec c) { return a * b + c; }
  // As the instructions: the second where one is not a number.
  static Vec min(Vec a, Vec b) {
    return each([&](int n) { return a[n] < b[n] ? a[n] : b[n]; });
  }
  static Vec max(Vec a, Vec b) {
    return each([&](int n) { return a[n] > b[n] ? a[n] : b[n]; });
  }
  static Vec round(Vec v) {
    return each([&](int n) { return nearbyintf(v[n]); });
  }
  static Vec times_power_of_two(Vec v, Vec n) {
    return each([&](int i) { return n[i] == n[i] ? ldexpf(v[i], static_cast<int>(n[i])) : n[i]; });
  }
  static void store_sums(const Vec* v, float* out) {
    for (int n = 0; n < 4; ++n) out[n] = (v[n][0] + v[n][2]) + (v[n][1] + v[n][3]);
  }
};

}  // namespace
}  // namespace moeopt
