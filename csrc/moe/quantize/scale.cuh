// The scale of a block of 128 values, from their largest magnitude.
#pragma once

namespace flashmoe {
namespace moe {

// e4m3's largest number is 448. Of a block of zeros, too, the scale and its inverse are finite. A NaN does not enter the maximum
// and stays itself; an infinity makes all of its block NaN.
struct BlockScale {
  float scale;
  float inverse;

  __device__ __forceinline__ explicit BlockScale(float largest)
      : scale(fmaxf(largest, 7.888609052210118e-31f) * (1.0f / 448.0f)), inverse(1.0f / scale) {}  // 2^-100
};

}  // namespace moe
}  // namespace flashmoe
