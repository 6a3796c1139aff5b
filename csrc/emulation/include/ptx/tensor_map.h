// Emulated: 128 bytes that emulation_encode_tensor_map fills, with the size and the alignment of the driver's.
#pragma once

namespace flashmoe::ptx {

struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

}  // namespace flashmoe::ptx
