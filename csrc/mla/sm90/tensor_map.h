// What the host passes to cuTensorMapEncodeTiled. Plain C++; see attention/forward/sm90/tensor_map.h.
#pragma once

#include "attention/forward/sm90/tensor_map.h"
#include "mla/params/fp8.h"
#include "mla/params/decode.h"

namespace flashmoe::mla::sm90 {

struct DecodeTensorMaps {
  attention::sm90::TensorMapArguments q;
  attention::sm90::TensorMapArguments cache;
};

// Keys per box: the greatest power of two that divides the page, at most a key block. Without a block table a sequence
// is one page, past whose end a box reads zeros.
inline int page_box_rows(bool has_pages, int page_size, int block_n) {
  if (!has_pages) return block_n;
  const int both = page_size | block_n;
  return both & -both;
}

// params.box_rows: page_box_rows of the kernel's block. FP8 values are loaded in pairs, as 16-bit elements.
inline DecodeTensorMaps decode_tensor_maps(const DecodeParams& params, int) {
  const attention::Strides q{params.q_stride_batch, params.q_stride_row, params.q_stride_row};
  const int values = params.is_fp8 != 0 ? 2 : 1;  // per 16 bits
  const attention::Strides cache{params.page_stride / values, params.key_stride / values, params.key_stride / values};
  const int key_elements = params.is_fp8 != 0 ? kFp8KeyBytes / 2 : kHeadDim;
  return DecodeTensorMaps{attention::sm90::tensor_map_arguments(params.q, q, kHeadDim, params.tokens * params.heads, 1,
                                                                params.batch, params.block_m),
                          attention::sm90::tensor_map_arguments(params.cache, cache, key_elements, params.page_size, 1,
                                                                params.num_pages, params.box_rows)};
}

}  // namespace flashmoe::mla::sm90
