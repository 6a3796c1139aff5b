// The 16-bit element types as storage. No conversions here: they are each instruction set's own (vector_*.h).
#pragma once

#include <cstdint>

namespace flashmoe {
namespace cpu {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

}  // namespace cpu
}  // namespace flashmoe
