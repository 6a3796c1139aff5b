// The few short vectors of CUDA that conversions use.
#pragma once

struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return float2{x, y}; }
