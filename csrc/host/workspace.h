// Scratch memory of one operator call: add() each buffer, allocate(), then take the buffers' addresses. One allocation
// serves all, because each costs the calling thread about a microsecond.
#pragma once

#include <cstdint>

#include "host/driver.h"
#include "host/tensor.h"

namespace flashmoe::host {

class Workspace {
 public:
  // Room for `elements` of type T; returns what address() takes.
  template <class T>
  int64_t add(int64_t elements) {
    const int64_t offset = bytes_;
    bytes_ += (elements * static_cast<int64_t>(sizeof(T)) + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    return offset;
  }

  // From torch's allocator, for the call's stream. The memory is returned with this object: what is queued on the
  // stream by then may still use it, because the allocator reuses it in stream order.
  void allocate(const CudaCall& call) {
    memory_ = empty({bytes_}, aoti_torch_dtype_uint8(), aoti_torch_device_type_cuda(), call.gpu.index);
    address_ = static_cast<char*>(memory_.data());
  }

  // Uninitialised, 128-byte aligned.
  template <class T>
  T* address(int64_t offset) const {
    return reinterpret_cast<T*>(address_ + offset);
  }

 private:
  static constexpr int64_t kAlignBytes = 128;
  int64_t bytes_ = 0;
  Tensor memory_;
  char* address_ = nullptr;
};

}  // namespace flashmoe::host
