// Integer arithmetic that kernels of any operation need.
#pragma once

namespace flashmoe {

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Compiled to selects, unlike CUDA's min and max, which are instructions from the start: the sm90 kernels' machine code
// depends on it.
__device__ __forceinline__ int minimum(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int maximum(int a, int b) { return a > b ? a : b; }

}  // namespace flashmoe
