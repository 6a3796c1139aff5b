#include "emulation/api.h"

#include <cstdio>
#include <cstring>

#include "emulation/internal.h"

using flashmoe::emulation::kTensorMapMagic;
using flashmoe::emulation::TensorMapContent;

extern "C" {

uint64_t emulation_add_buffer(void* storage, uint64_t bytes, int writable, int initialised, const char* name) {
  return flashmoe::emulation::add_buffer(storage, bytes, writable != 0, initialised != 0, name);
}

uint64_t emulation_reserve(uint64_t bytes) { return flashmoe::emulation::reserve_addresses(bytes); }

void emulation_map_buffer(uint64_t address, void* storage, uint64_t bytes, int writable, int initialised,
                          const char* name) {
  flashmoe::emulation::map_buffer(address, storage, bytes, writable != 0, initialised != 0, name);
}

void emulation_expect_from_preceding_grid(uint64_t address) {
  flashmoe::emulation::expect_from_preceding_grid(address);
}

void emulation_clear_buffers() { flashmoe::emulation::clear_buffers(); }

const char* emulation_encode_tensor_map(void* map, int element_bytes, int rank, uint64_t address, const uint64_t* dims,
                                        const uint64_t* strides, const uint32_t* box, int swizzle_bytes) {
  if (rank < 1 || rank > 5) return "rank: 1 to 5 are modelled";
  if (address % 16 != 0) return "the global address is not a multiple of 16";
  TensorMapContent content{};
  content.magic = kTensorMapMagic;
  content.rank = static_cast<uint8_t>(rank);
  content.element_bytes = static_cast<uint8_t>(element_bytes);
  content.swizzle_bytes = static_cast<uint8_t>(swizzle_bytes);
  content.address = address;
  for (int d = 0; d < rank; ++d) {
    if (dims[d] == 0 || dims[d] > uint64_t{1} << 32) return "a dimension is 0 or above 2^32";
    if (box[d] == 0 || box[d] > 256) return "a box dimension is 0 or above 256";
    content.dims[d] = dims[d];
    content.box[d] = box[d];
    if (d == 0) continue;
    if (strides[d - 1] % 16 != 0 || strides[d - 1] >= uint64_t{1} << 40)
      return "a stride is no multiple of 16, or too large";
    content.strides[d - 1] = strides[d - 1];
  }
  const uint32_t row = box[0] * static_cast<uint32_t>(element_bytes);
  if (row % 16 != 0) return "the inner box dimension is no multiple of 16 bytes";
  if (swizzle_bytes != 0 && row != static_cast<uint32_t>(swizzle_bytes)) {
    return "the inner box dimension must span the swizzle (narrower boxes are not modelled)";
  }
  std::memset(map, 0, 128);
  std::memcpy(map, &content, sizeof content);
  return nullptr;
}

const char* emulation_launch(const flashmoe::emulation::Launch* launch) {
  static std::string report;
  report = flashmoe::emulation::run_launch(*launch);
  return report.c_str();
}

}  // extern "C"
