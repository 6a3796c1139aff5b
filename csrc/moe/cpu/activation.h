// The activation between the two products of the layer, and its derivatives. Include after a vector_*.h. Internal
// linkage.
#pragma once

#include <type_traits>

#include "cpu/exp2.h"
#include "moe/params/gemm.h"

namespace flashmoe::cpu {
namespace {

using moe::Activation;

constexpr float kLog2E = 1.4426950408889634f;

inline Vector::Float negate(Vector::Float x) { return Vector::sub(Vector::zero(), x); }
inline Vector::Float absolute(Vector::Float x) { return Vector::max(negate(x), x); }  // NaN propagates, here and below
inline Vector::Float at_most(float limit, Vector::Float x) {
  return negate(Vector::max(Vector::broadcast(-limit), negate(x)));
}
inline Vector::Float at_least(float limit, Vector::Float x) { return Vector::max(Vector::broadcast(limit), x); }
// e^x for x <= 0.
inline Vector::Float exp_negative(Vector::Float x) {
  return exp2<kExpDegreeFull>(Vector::mul(x, Vector::broadcast(kLog2E)));
}
// Selects yes where x >= 0, else (also for NaN) no.
inline Vector::Float where_positive(Vector::Float x, Vector::Float yes, Vector::Float no) {
  return Vector::where_equal(Vector::max(x, Vector::zero()), x, yes, no);
}

// s = 1 / (1 + e^-x) and 1 - s, small values of both in full precision: computed as a difference from 1, the rest would
// have the rounding of 1, and the slopes below multiply it by up to 20.
struct Sigmoid {
  Vector::Float share;
  Vector::Float rest;
};

inline Sigmoid sigmoid(Vector::Float x) {
  const Vector::Float one = Vector::broadcast(1.0f), e = exp_negative(negate(absolute(x))), sum = Vector::add(one, e);
  return {Vector::div(where_positive(x, one, e), sum), Vector::div(where_positive(x, e, one), sum)};
}

// f(g) and its derivative, where the activation is f(g) * u.
struct Gate {
  Vector::Float value;
  Vector::Float slope;
};

inline Gate silu(Vector::Float g, float steepness) {
  const Vector::Float alpha = Vector::broadcast(steepness);
  const Sigmoid s = sigmoid(Vector::mul(alpha, g));
  const Vector::Float value = Vector::mul(g, s.share);
  return {value, Vector::fma(Vector::mul(alpha, value), s.rest, s.share)};
}

// g Phi(g), Phi by Abramowitz and Stegun 7.1.26: within 8e-8.
inline Gate gelu(Vector::Float g) {
  const Vector::Float one = Vector::broadcast(1.0f), x = Vector::mul(absolute(g), Vector::broadcast(0.70710678f));
  const Vector::Float t = Vector::div(one, Vector::fma(x, Vector::broadcast(0.3275911f), one));
  const Vector::Float e = exp_negative(negate(Vector::mul(x, x)));
  Vector::Float p = Vector::broadcast(1.061405429f);
  static constexpr float kRest[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
  for (float coefficient : kRest) {
    p = Vector::fma(p, t, Vector::broadcast(coefficient));
  }
  const Vector::Float tail = Vector::mul(Vector::mul(Vector::mul(p, t), e), Vector::broadcast(0.5f));  // Phi(-|g|)
  const Vector::Float cdf = where_positive(g, Vector::sub(one, tail), tail);
  return {Vector::mul(g, cdf), Vector::fma(Vector::mul(g, e), Vector::broadcast(0.39894228f), cdf)};
}

// g (1 + tanh(y)) / 2 = g sigmoid(2 y), y = sqrt(2 / pi) (g + 0.044715 g^3).
inline Gate gelu_tanh(Vector::Float g) {
  const Vector::Float one = Vector::broadcast(1.0f), c = Vector::broadcast(2 * 0.7978845608f);
  const Vector::Float square = Vector::mul(Vector::mul(g, g), Vector::broadcast(0.044715f));
  const Sigmoid s = sigmoid(Vector::mul(Vector::mul(c, g), Vector::add(square, one)));
  const Vector::Float slope = Vector::mul(c, Vector::fma(square, Vector::broadcast(3.0f), one));
  const Vector::Float value = Vector::mul(g, s.share);
  return {value, Vector::fma(Vector::mul(value, s.rest), slope, s.share)};
}

// 0 at 0, as in torch.
inline Gate relu(Vector::Float g) {
  const Vector::Float value = Vector::max(Vector::zero(), g);
  return {value, Vector::where_equal(value, Vector::zero(), Vector::zero(), Vector::broadcast(1.0f))};
}

template <Activation kActivation>
inline Gate gate_of(Vector::Float g) {
  if constexpr (kActivation == Activation::kSwiglu) return silu(g, 1.0f);
  if constexpr (kActivation == Activation::kGeglu) return gelu(g);
  if constexpr (kActivation == Activation::kGegluTanh) return gelu_tanh(g);
  if constexpr (kActivation == Activation::kReglu) return relu(g);
  return silu(g, 1.702f);
}

constexpr float kClamp = 7.0f;

template <Activation kActivation>
inline Vector::Float activate(Vector::Float g, Vector::Float u) {
  if constexpr (kActivation == Activation::kClampedSwiglu) {
    g = at_most(kClamp, g);
    u = Vector::add(at_least(-kClamp, at_most(kClamp, u)), Vector::broadcast(1.0f));
  }
  return Vector::mul(gate_of<kActivation>(g).value, u);
}

struct Derivatives {
  Vector::Float value;
  Vector::Float gate;
  Vector::Float up;
};

// A clamped value has derivative 0; a value at the limit has the derivative of the inside, as in torch.
template <Activation kActivation>
inline Derivatives differentiate(Vector::Float g, Vector::Float u) {
  if constexpr (kActivation == Activation::kClampedSwiglu) {
    const Vector::Float g_in = at_most(kClamp, g), u_in = at_least(-kClamp, at_most(kClamp, u));
    const Vector::Float up = Vector::add(u_in, Vector::broadcast(1.0f)), zero = Vector::zero();
    const Gate gate = gate_of<kActivation>(g_in);
    return {Vector::mul(gate.value, up), Vector::where_equal(g_in, g, Vector::mul(gate.slope, up), zero),
            Vector::where_equal(u_in, u, gate.value, zero)};
  }
  const Gate gate = gate_of<kActivation>(g);
  return {Vector::mul(gate.value, u), Vector::mul(gate.slope, u), gate.value};
}

// Calls body with the activation as a compile-time constant.
template <class Body>
inline void with_activation(Activation activation, Body body) {
  switch (activation) {
    case Activation::kSwiglu:
      return body(std::integral_constant<Activation, Activation::kSwiglu>());
    case Activation::kGeglu:
      return body(std::integral_constant<Activation, Activation::kGeglu>());
    case Activation::kGegluTanh:
      return body(std::integral_constant<Activation, Activation::kGegluTanh>());
    case Activation::kReglu:
      return body(std::integral_constant<Activation, Activation::kReglu>());
    case Activation::kClampedSwiglu:
      return body(std::integral_constant<Activation, Activation::kClampedSwiglu>());
  }
}

}  // namespace
}  // namespace flashmoe::cpu
