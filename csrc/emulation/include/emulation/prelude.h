// The CUDA words of a kernel source, for g++. Force-included before every emulated translation unit.
#pragma once

#include <cmath>
#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __constant__ const
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__

using uint = unsigned int;
