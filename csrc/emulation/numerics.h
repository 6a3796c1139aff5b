// Number formats and the arithmetic of the tensor cores.
#pragma once

#include <cstdint>
#include <cstring>

namespace flashmoe::emulation {

enum class Format { kF16, kBF16, kE4M3 };

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// IEEE binary16 to binary32: exact.
inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 31) return bits_float(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return bits_float(sign | float_bits(magnitude));
}

// cvt.rn.f16.f32: to nearest, ties to even; subnormals kept; NaN becomes 0x7fff as on the GPU.
inline uint16_t float_to_f16(float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // 65520 and above rounds to infinity
  if (magnitude < 0x38800000u) {                       // below 2^-14: in units of 2^-24
    const float scaled = bits_float(magnitude) * 0x1p24f;
    const uint32_t whole = static_cast<uint32_t>(scaled);
    const float rest = scaled - static_cast<float>(whole);
    return sign | static_cast<uint16_t>(whole + (rest > 0.5f || (rest == 0.5f && (whole & 1))));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

inline float bf16_to_float(uint16_t bits) { return bits_float(static_cast<uint32_t>(bits) << 16); }

// cvt.rn.bf16.f32: to nearest, ties to even; NaN becomes 0x7fff.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// e4m3fn: exponents biased by 7, no infinity; 0x7f and 0xff are NaN. Exact.
inline float e4m3_to_float(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80) << 24;
  const uint32_t exponent = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 0x7f) == 0x7f) return bits_float(sign | 0x7fc00000u);
  if (exponent != 0) return bits_float(sign | (exponent + 120) << 23 | fraction << 20);
  const float magnitude = static_cast<float>(fraction) * 0x1p-9f;
  return bits_float(sign | float_bits(magnitude));
}

// cvt.rn.satfinite.e4m3x2.f32, one of the two: to nearest, ties to even; beyond 448 becomes 448, NaN 0x7f.
inline uint8_t float_to_e4m3(float value) {
  const uint32_t bits = float_bits(value);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude >= 0x43e00000u) return sign | 0x7e;  // 448 and above
  if (magnitude < 0x3c800000u) {                     // below 2^-6: in units of 2^-9
    const float scaled = bits_float(magnitude) * 0x1p9f;
    const uint32_t whole = static_cast<uint32_t>(scaled);
    const float rest = scaled - static_cast<float>(whole);
    return sign | static_cast<uint8_t>(whole + (rest > 0.5f || (rest == 0.5f && (whole & 1))));
  }
  const uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
  return sign | static_cast<uint8_t>((rounded - 0x3c000000u) >> 20);
}

// .ftz: subnormals become zero of the same sign.
inline float flush_to_zero(float value) {
  return (float_bits(value) & 0x7f800000u) == 0 ? bits_float(float_bits(value) & 0x80000000u) : value;
}

// For a 16-bit format.
float element_to_float(Format format, uint16_t bits);

// How a generation of tensor cores adds: `block` products and the accumulator are aligned to the largest exponent among
// them, cut (toward zero) extra_bits below the 24 bits of a float, added exactly, and cut to a float. Facts from
// Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004).
struct TensorCore {
  int block;
  int extra_bits;
};

// With 8-bit operands Hopper keeps 13 bits below the leading one of the largest product. That is why the kernels sum
// over 128 of k, and add each sum to an fp32 sum outside the tensor cores.
constexpr TensorCore kHopperE4M3{32, -10};

// d[rows][columns] += a[rows][k] * b[k][columns]; rows a multiple of 4, columns of 8, k of 8, at most 32.
void tensor_core_product(const TensorCore& core, int rows, int columns, int k, float* d, const float* a,
                         const float* b);

}  // namespace flashmoe::emulation
