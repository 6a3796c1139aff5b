#include "emulation/numerics.h"

#include <cmath>
#include <limits>
#include <vector>

namespace flashmoe {
namespace emulation {

namespace {

constexpr int kLanes = 8;  // columns handled together: one AVX-512 or two AVX2 registers of doubles

std::vector<float> f16_table() {
  std::vector<float> table(65536);
  for (int bits = 0; bits < 65536; ++bits) table[bits] = f16_to_float(static_cast<uint16_t>(bits));
  return table;
}

// 2^exponent of the value, exponents below those of normal numbers counting as the smallest; 0 for 0. Infinities and NaN
// need no alignment: they pass through the sum as they are.
inline double exponent_power(double value, double smallest) {
  uint64_t bits;
  std::memcpy(&bits, &value, 8);
  bits &= 0x7ff0000000000000ull;
  double power;
  std::memcpy(&power, &bits, 8);
  if (value == 0) return 0;
  if (!(power < std::numeric_limits<double>::infinity())) return 1;
  return power < smallest ? smallest : power;
}

inline float cut_to_float(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, 8);
  if (std::fabs(value) >= 0x1p-126) bits &= ~((1ull << 29) - 1);
  double cut;
  std::memcpy(&cut, &bits, 8);
  return static_cast<float>(cut);
}

}  // namespace

float element_to_float(Format format, uint16_t bits) {
  static const std::vector<float> table = f16_table();
  return format == Format::kF16 ? table[bits] : bf16_to_float(bits);
}

#if defined(__x86_64__) && !defined(FLASHMOE_EMULATION_SANITIZE)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static void block_product(int block, double scale_down, const double* a, const double* a_power, const double* b,
                          const double* b_power, int stride, double* d) {
  double largest[kLanes], sum[kLanes], power[kLanes];
  for (int j = 0; j < kLanes; ++j) {
    uint64_t bits;
    std::memcpy(&bits, &d[j], 8);
    bits &= 0x7ff0000000000000ull;
    std::memcpy(&power[j], &bits, 8);
    largest[j] = power[j] < 0x1p-126 ? 0x1p-126 : power[j];
    largest[j] = power[j] > 0x1p1000 ? 1.0 : largest[j];  // infinity and NaN pass through
    largest[j] = d[j] == 0 ? 0.0 : largest[j];
  }
  for (int k = 0; k < block; ++k) {
    for (int j = 0; j < kLanes; ++j) {
      const double candidate = a_power[k] * b_power[k * stride + j];
      largest[j] = candidate > largest[j] ? candidate : largest[j];
    }
  }
  double inverse[kLanes], quantum[kLanes];
  for (int j = 0; j < kLanes; ++j) {
    quantum[j] = largest[j] * scale_down;
    inverse[j] = largest[j] == 0 ? 0.0 : 1.0 / quantum[j];
    sum[j] = __builtin_trunc(d[j] * inverse[j]);
  }
  for (int k = 0; k < block; ++k) {
    for (int j = 0; j < kLanes; ++j) sum[j] += __builtin_trunc(a[k] * b[k * stride + j] * inverse[j]);
  }
  for (int j = 0; j < kLanes; ++j) d[j] = sum[j] * quantum[j];
}

void tensor_core_product(const TensorCore& core, int rows, int columns, int k, float* d, const float* a,
                         const float* b) {
  thread_local std::vector<double> storage;
  storage.resize(static_cast<size_t>(2 * k * (rows + columns)));
  double* a_value = storage.data();
  double* a_power = a_value + rows * k;
  double* b_value = a_power + rows * k;
  double* b_power = b_value + k * columns;
  // A subnormal 16-bit operand would have the exponent of the smallest normal one (2^-14 or 2^-126); aligning it by its
  // own leading bit keeps at least as many bits, and differs only when every product of the block is that small.
  for (int i = 0; i < rows * k; ++i) a_value[i] = a[i], a_power[i] = exponent_power(a[i], 0x1p-126);
  for (int i = 0; i < k * columns; ++i) b_value[i] = b[i], b_power[i] = exponent_power(b[i], 0x1p-126);
  const double scale_down = std::ldexp(1.0, -23 - core.extra_bits);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; j += kLanes) {
      double lane[kLanes];
      for (int c = 0; c < kLanes; ++c) lane[c] = d[i * columns + j + c];
      for (int begin = 0; begin < k; begin += core.block) {
        const int block = core.block < k - begin ? core.block : k - begin;
        block_product(block, scale_down, a_value + i * k + begin, a_power + i * k + begin,
                      b_value + begin * columns + j, b_power + begin * columns + j, columns, lane);
        for (int c = 0; c < kLanes; ++c) lane[c] = cut_to_float(lane[c]);
      }
      for (int c = 0; c < kLanes; ++c) d[i * columns + j + c] = static_cast<float>(lane[c]);
    }
  }
}

}  // namespace emulation
}  // namespace flashmoe
