// Tensors that a kernel cannot load in place, and the copies that it gets instead.
#pragma once

#include <cstdint>

#include "host/kernel_table.h"
#include "host/tensor.h"

namespace flashmoe::host {

constexpr int64_t kElementBytes = 2;      // CUDA kernels take 16-bit types only
constexpr int64_t kRowAlignElements = 8;  // alignment of every row that a kernel loads: 16 bytes

// Whether the kernel can load the tensor in place: whole 16-byte chunks, and for TMA no dimension that repeats (stride
// 0). The last dimension is contiguous.
bool is_loadable(const Tensor& tensor, const Kernel& kernel);

// The tensor's sizes, the last rounded up to whole 16-byte chunks.
Sizes padded_sizes(const Tensor& tensor);

// Contiguous and uninitialised, with the tensor's type and device.
Tensor empty_like(const Tensor& tensor, const Sizes& sizes);

// A contiguous copy of padded_sizes, with zeros in the added columns.
Tensor padded_copy(const Tensor& tensor);

// The tensor itself, or a padded copy.
Tensor loadable(const Tensor& tensor, const Kernel& kernel);

// The tensor itself if it is contiguous, else a contiguous copy.
Tensor contiguous(const Tensor& tensor);

// Copies `padded` without its padding to `tensor`: the way back for an output.
void copy_unpadded(const Tensor& padded, const Tensor& tensor);

}  // namespace flashmoe::host
