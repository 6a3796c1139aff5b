// The element types. The 16-bit ones are storage only: each instruction set has its own conversions (vector_*.h).
#pragma once

#include <cstdint>

namespace flashmoe::cpu {

enum class ScalarType { kFloat32, kFloat16, kBFloat16 };

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

}  // namespace flashmoe::cpu
