// Elements of "device" memory, in bfloat16, as the loops that replace kernels read and write them.
#pragma once

#include <cstdint>
#include <cstring>

namespace flashmoe::host {

inline float load(const void* address, int64_t index) {
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(address)[index]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline void store(void* address, int64_t index, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value == value) bits += 0x7fff + (bits >> 16 & 1);
  static_cast<uint16_t*>(address)[index] = static_cast<uint16_t>(bits >> 16);
}

}  // namespace flashmoe::host
