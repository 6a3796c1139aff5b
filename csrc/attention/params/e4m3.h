// What the host passes to kernels that read a cache of 8-bit floats. Plain C types only.
#pragma once

#include "attention/params/append.h"
#include "attention/params/forward.h"

namespace flashmoe {
namespace attention {

// What a cache's codes are multiplied by: factor * values[index * stride + head * head_stride], index that of the sequence or of the page.
struct CacheScale {
  const float* values;  // null: `factor` alone
  int64_t stride;       // 0: the same for all
  int64_t head_stride;
  float factor;
  int32_t is_of_pages;  // then pages are a multiple of 16 keys
};

// k and v hold e4m3, all else is as in ForwardParams.
struct E4m3ForwardParams {
  ForwardParams forward;
  CacheScale k_scale;
  CacheScale v_scale;
};

// The caches hold e4m3, the new rows 16 bits, which are divided by the scale as they are appended.
struct E4m3AppendParams {
  AppendParams append;
  CacheScale k_scale;
  CacheScale v_scale;
};

}  // namespace attention
}  // namespace flashmoe
