// The 128 bytes that describe a tensor to TMA, as cuTensorMapEncodeTiled writes them (the driver's CUtensorMap,
// declared here so that device code needs no cuda.h). Plain C++: host, NVRTC and emulation read it.
#pragma once

namespace flashmoe::ptx {

struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

}  // namespace flashmoe::ptx
