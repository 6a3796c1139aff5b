#pragma once

#include <cstdint>

namespace flashmoe {

// The quotient of two non-negative numbers, rounded up.
inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace flashmoe
