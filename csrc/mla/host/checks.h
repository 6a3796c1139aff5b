// Checks that the operators of multi-head latent attention share; each throws the first rule that is broken.
#pragma once

#include "host/tensor.h"

namespace flashmoe::mla {

using host::Dtype;
using host::Tensor;

void check_last_stride(const Tensor& tensor, const char* name);

// On the device of `base`, an argument of that name.
void check_device(const Tensor& tensor, const char* name, const Tensor& base, const char* base_name);

// A tensor that goes with `base`, of one dtype and shape; the last dimension is contiguous.
void check_companion(const Tensor& tensor, const char* name, const Tensor& base, const char* base_name, int32_t dtype,
                     int64_t rank, int64_t length);

// A cache of 8-bit floats holds bytes, or e4m3 by which they are viewed.
bool has_code_dtype(const Tensor& cache);

// [pages, page_size, 656], or [batch, keys, 656] without pages; rows lie at multiples of 16 bytes.
void check_coded_cache(const Tensor& cache, bool has_pages, int64_t batch);

void check_page_size(const Tensor& cache);

}  // namespace flashmoe::mla
