#include "emulation/numerics.h"

#include <cmath>
#include <limits>
#include <vector>

namespace flashmoe::emulation {

namespace {

constexpr int kLanes = 8;  // columns handled together: one AVX-512 or two AVX2 registers of doubles
constexpr int kRowsAtOnce = 4;

std::vector<float> f16_table() {
  std::vector<float> table(65536);
  for (int bits = 0; bits < 65536; ++bits) table[bits] = f16_to_float(static_cast<uint16_t>(bits));
  return table;
}

// 2^exponent of the value; exponents below those of normal numbers count as the smallest; 0 for 0. Infinities and NaN
// need no alignment: they pass through the sum unchanged.
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

// Columns of one row are the lanes of a vector; several rows at once, whose sums do not wait for each other.
typedef double Lanes __attribute__((vector_size(8 * kLanes)));
typedef int64_t Bits __attribute__((vector_size(8 * kLanes)));
constexpr Bits kExponent = Bits{} + 0x7ff0000000000000ll, kSign = Bits{} + static_cast<int64_t>(1ull << 63);

// For values below 2^52, which quotients by the largest value's quantum are unless something infinite takes part.
inline __attribute__((always_inline)) Lanes truncated(Lanes value) {
  const Lanes size = reinterpret_cast<Lanes>(reinterpret_cast<Bits>(value) & ~kSign);
  Lanes whole = (size + 0x1p52) - 0x1p52;
  whole -= whole > size ? Lanes{} + 1.0 : Lanes{};
  return reinterpret_cast<Lanes>(reinterpret_cast<Bits>(whole) | (reinterpret_cast<Bits>(value) & kSign));
}

template <int kRows>
inline __attribute__((always_inline)) void add_products(int block, double scale_down, int k, const double* a,
                                                        const double* a_power, const double* b, const double* b_power,
                                                        int columns, Lanes (&sum)[kRows]) {
  Lanes largest[kRows], inverse[kRows];
  for (int i = 0; i < kRows; ++i) {
    const Lanes power = reinterpret_cast<Lanes>(reinterpret_cast<Bits>(sum[i]) & kExponent);
    largest[i] = power < 0x1p-126 ? Lanes{} + 0x1p-126 : power;
    largest[i] = power > 0x1p1000 ? Lanes{} + 1.0 : largest[i];  // infinity and NaN pass through
    largest[i] = sum[i] == 0 ? Lanes{} : largest[i];
  }
  for (int at = 0; at < block; ++at) {
    Lanes column;
    std::memcpy(&column, b_power + at * columns, sizeof column);
    for (int i = 0; i < kRows; ++i) {
      const Lanes candidate = a_power[i * k + at] * column;
      largest[i] = candidate > largest[i] ? candidate : largest[i];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    inverse[i] = largest[i] == 0 ? Lanes{} : 1.0 / (largest[i] * scale_down);
    sum[i] = truncated(sum[i] * inverse[i]);
  }
  for (int at = 0; at < block; ++at) {
    Lanes column;
    std::memcpy(&column, b + at * columns, sizeof column);
    for (int i = 0; i < kRows; ++i) sum[i] += truncated(a[i * k + at] * column * inverse[i]);
  }
  for (int i = 0; i < kRows; ++i) sum[i] *= largest[i] * scale_down;
}

#if defined(__x86_64__) && !defined(FLASHMOE_EMULATION_SANITIZE)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
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
  for (int i = 0; i < rows; i += kRowsAtOnce) {
    for (int j = 0; j < columns; j += kLanes) {
      Lanes sum[kRowsAtOnce];
      for (int r = 0; r < kRowsAtOnce; ++r) {
        for (int c = 0; c < kLanes; ++c) sum[r][c] = d[(i + r) * columns + j + c];
      }
      for (int begin = 0; begin < k; begin += core.block) {
        const int block = core.block < k - begin ? core.block : k - begin;
        add_products(block, scale_down, k, a_value + i * k + begin, a_power + i * k + begin,
                     b_value + begin * columns + j, b_power + begin * columns + j, columns, sum);
        for (Lanes& row : sum) {
          for (int c = 0; c < kLanes; ++c) row[c] = cut_to_float(row[c]);
        }
      }
      for (int r = 0; r < kRowsAtOnce; ++r) {
        for (int c = 0; c < kLanes; ++c) d[(i + r) * columns + j + c] = static_cast<float>(sum[r][c]);
      }
    }
  }
}

}  // namespace flashmoe::emulation
