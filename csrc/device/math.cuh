// Integer arithmetic that kernels of any operation need.
#pragma once

namespace flashmoe {

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace flashmoe
