// SwiGLU on one row of 16 values, with the exponential function it needs.
//
// `Simd` is an instruction set: Vec (kLanes floats, a vector type of the compiler) and what has no operator. Internal
// linkage: see number_formats.h.
#pragma once

#include "../expert_kernels.h"

namespace moeopt {
namespace {

// exp(v), within 2 units in the last place on [-87, 88], clamped outside; NaN stays NaN.
// Range reduction by multiples of ln 2 (in two parts), then the Taylor polynomial of degree 6: its remainder
// on [-ln2/2, ln2/2] is below 2^-26.
template <typename Simd>
inline typename Simd::Vec exponential(typename Simd::Vec v) {
  using Vec = typename Simd::Vec;
  // NaN is the second operand on purpose: min and max return it then.
  v = Simd::min(Simd::set1(88.0f), Simd::max(Simd::set1(-87.0f), v));
  const Vec n = Simd::round(v * 1.44269504088896341f);
  Vec r = Simd::fmadd(n, Simd::set1(-0.693359375f), v);
  r = Simd::fmadd(n, Simd::set1(2.12194440e-4f), r);
  Vec p = Simd::set1(1.0f / 720);
  p = Simd::fmadd(p, r, Simd::set1(1.0f / 120));
  p = Simd::fmadd(p, r, Simd::set1(1.0f / 24));
  p = Simd::fmadd(p, r, Simd::set1(1.0f / 6));
  p = Simd::fmadd(p, r, Simd::set1(0.5f));
  p = Simd::fmadd(p, r, Simd::set1(1.0f));
  p = Simd::fmadd(p, r, Simd::set1(1.0f));
  return Simd::times_power_of_two(p, n);
}

template <typename Simd>
inline typename Simd::Vec sigmoid(typename Simd::Vec v) {
  return 1.0f / (1.0f + exponential<Simd>(0.0f - v));
}

template <typename Simd>
inline typename Simd::Vec activate(Activation activation, typename Simd::Vec gate, typename Simd::Vec up) {
  if (activation == Activation::kSwigluOai) {
    gate = Simd::min(Simd::set1(7.0f), gate);
    up = Simd::max(Simd::set1(-7.0f), Simd::min(Simd::set1(7.0f), up));
    return gate * sigmoid<Simd>(1.702f * gate) * (up + 1.0f);
  }
  return gate * sigmoid<Simd>(gate) * up;
}

}  // namespace
}  // namespace moeopt
