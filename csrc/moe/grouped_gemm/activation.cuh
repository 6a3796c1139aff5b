// The activation between the two products, computed from a row's gate g and up u, and its gradient. fp32 in, fp32 out.
//
// Every activation is gate_value(g) * up_factor(u). A NaN in g or u stays NaN: limits are compared so that it passes.
//
//                   gate_value v                      its slope v'                                  up_factor
//   swiglu          g s, s = sigmoid(g)               s + v (1 - s)                                 u
//   geglu           g c, c = (1 + erf(g/sqrt 2)) / 2  c + g exp(-g^2/2) / sqrt(2 pi)                u
//   geglu_tanh      g s, s = sigmoid(2 p(g)),         s + v (1 - s) 2 p'(g)                         u
//                   p(g) = sqrt(2/pi) (g + 0.044715 g^3)
//   reglu           max(g, 0)                         1 where g > 0, else 0                         u
//   clamped_swiglu  h s, h = min(g, 7),               (s + 1.702 v (1 - s)) where g <= 7, else 0    1 + u clamped to [-7, 7],
//                   s = sigmoid(1.702 h)                                                            slope 1 within
//
// A clamp passes the gradient at its limits, and max(g, 0) passes none at 0, as in PyTorch. (1 + tanh p) / 2 =
// sigmoid(2 p).
#pragma once

#include "moe/params/gemm.h"
#include "ptx/math.cuh"

namespace flashmoe::moe {

constexpr float kClampLimit = 7.0f;
constexpr float kClampAlpha = 1.702f;

__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kLog2e = 1.44269504088896340736f;
  return ptx::rcp_approx(1.0f + ptx::exp2_approx(-kLog2e * x));
}

// The activation at one (g, u) and its derivatives with respect to both.
struct ActivationGradient {
  float value;
  float by_gate;
  float by_up;
};

template <Activation kActivation>
struct Activate {
  // v and, if requested, v'.
  template <bool kWithSlope>
  static __device__ __forceinline__ void gate(float g, float& value, float& slope) {
    if constexpr (kActivation == Activation::kReglu) {
      value = g <= 0.0f ? 0.0f : g;
      if constexpr (kWithSlope) slope = g <= 0.0f ? 0.0f : 1.0f;
    } else if constexpr (kActivation == Activation::kGeglu) {
      const float cdf = 0.5f + 0.5f * erff(g * 0.70710678118654752440f);
      value = g * cdf;
      if constexpr (kWithSlope) {
        constexpr float kHalfLog2e = 0.72134752044448170368f;
        slope = cdf + g * 0.39894228040143267794f * ptx::exp2_approx(-kHalfLog2e * g * g);
      }
    } else if constexpr (kActivation == Activation::kGegluTanh) {
      constexpr float kLinear = 1.59576912160573071176f;  // 2 sqrt(2 / pi)
      constexpr float kCubic = 0.044715f;
      const float s = sigmoid(kLinear * (g + kCubic * g * g * g));
      value = g * s;
      if constexpr (kWithSlope) {
        // g s (1 - s). For large |g| it is 0, because 1 - s or s is, and the square of g may be inf.
        const float d_sigmoid = value * (1.0f - s);
        slope = d_sigmoid == 0.0f ? s : s + d_sigmoid * kLinear * (1.0f + 3.0f * kCubic * g * g);
      }
    } else if constexpr (kActivation == Activation::kClampedSwiglu) {
      const float h = g > kClampLimit ? kClampLimit : g;
      const float s = sigmoid(kClampAlpha * h);
      value = h * s;
      if constexpr (kWithSlope) slope = g > kClampLimit ? 0.0f : s + kClampAlpha * value * (1.0f - s);
    } else {
      static_assert(kActivation == Activation::kSwiglu, "one of the five");
      const float s = sigmoid(g);
      value = g * s;
      if constexpr (kWithSlope) slope = s + value * (1.0f - s);
    }
  }

  static __device__ __forceinline__ float up(float u) {
    if constexpr (kActivation != Activation::kClampedSwiglu) return u;
    return 1.0f + (u > kClampLimit ? kClampLimit : u < -kClampLimit ? -kClampLimit : u);
  }

  static __device__ __forceinline__ float forward(float g, float u) {
    float value, slope;
    gate<false>(g, value, slope);
    return value * up(u);
  }

  static __device__ __forceinline__ ActivationGradient backward(float g, float u) {
    float value, slope;
    gate<true>(g, value, slope);
    const float factor = up(u);
    float by_up = value;
    if constexpr (kActivation == Activation::kClampedSwiglu) by_up = u > kClampLimit || u < -kClampLimit ? 0.0f : value;
    return ActivationGradient{value * factor, slope * factor, by_up};
  }
};

// Calls run(Activate<...>()) for `activation`: a branch around a loop, not inside it.
template <typename Run>
__device__ __forceinline__ void with_activation(Activation activation, Run run) {
  switch (activation) {
    case Activation::kSwiglu:
      return run(Activate<Activation::kSwiglu>());
    case Activation::kGeglu:
      return run(Activate<Activation::kGeglu>());
    case Activation::kGegluTanh:
      return run(Activate<Activation::kGegluTanh>());
    case Activation::kReglu:
      return run(Activate<Activation::kReglu>());
    case Activation::kClampedSwiglu:
      return run(Activate<Activation::kClampedSwiglu>());
  }
}

}  // namespace flashmoe::moe
