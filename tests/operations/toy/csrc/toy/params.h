#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
#else
#include <cstdint>
#endif

namespace flashmoe::toy {

struct ScaleParams {
  const float* x;  // [count]
  float* out;      // [count]
  int32_t count;
  float scale;
};

}  // namespace flashmoe::toy
