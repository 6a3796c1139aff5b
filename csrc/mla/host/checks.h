// Checks that the operators of multi-head latent attention share; each throws on the first broken rule.
#pragma once

#include "host/tensor.h"

namespace flashmoe::mla {

using host::Dtype;
using host::Tensor;

void check_last_stride(const Tensor& tensor, const char* name);

// Requires the device of `base`, which is the argument base_name.
void check_device(const Tensor& tensor, const char* name, const Tensor& base, const char* base_name);

// A tensor that accompanies `base`, of one dtype and shape; the last dimension is contiguous.
void check_companion(const Tensor& tensor, const char* name, const Tensor& base, const char* base_name, int32_t dtype,
                     int64_t rank, int64_t length);

// Whether the cache holds 8-bit floats: uint8, or float8_e4m3fn, as which they can be viewed.
bool is_fp8_dtype(const Tensor& cache);

// [pages, page_size, 656], or [batch, keys, 656] without pages; rows start at multiples of 16 bytes.
void check_fp8_cache(const Tensor& cache, bool has_pages, int64_t batch);

void check_page_size(const Tensor& cache);

}  // namespace flashmoe::mla
