// Emulated: the signatures of csrc/ptx/memory.cuh plus the call site; a test compares the two.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ unsigned char* dynamic_shared_memory() { return emulation::shared_window(); }

__device__ __forceinline__ uint32_t smem_address(const void* smem, Site site = Site::here()) {
  return emulation::shared_address(smem, site, "smem_address");
}

struct SmemPointer {
  uint32_t address;

  SmemPointer() = default;
  __device__ __forceinline__ SmemPointer(const void* smem, Site site = Site::here())
      : address(smem_address(smem, site)) {}
  __device__ __forceinline__ SmemPointer operator+(int bytes) const {
    SmemPointer moved;
    moved.address = address + bytes;
    return moved;
  }
  __device__ __forceinline__ SmemPointer operator^(int bits) const {
    SmemPointer moved;
    moved.address = address ^ bits;
    return moved;
  }
};

__device__ __forceinline__ uint32_t smem_address(SmemPointer smem) { return smem.address; }

template <typename T>
__device__ __forceinline__ const T* advance_pointer(const T* gmem, int64_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<uint64_t>(gmem) + static_cast<uint64_t>(bytes));
}

__device__ __forceinline__ uint32_t ld_shared_32(SmemPointer smem, Site site = Site::here()) {
  uint32_t value;
  emulation::load_shared(&value, smem.address, 4, site, "ld_shared_32");
  return value;
}

__device__ __forceinline__ float ld_shared_float(SmemPointer smem, Site site = Site::here()) {
  float value;
  emulation::load_shared(&value, smem.address, 4, site, "ld_shared_float");
  return value;
}

__device__ __forceinline__ float4 ld_shared_float4(SmemPointer smem, Site site = Site::here()) {
  float4 value;
  emulation::load_shared(&value, smem.address, 16, site, "ld_shared_float4");
  return value;
}

__device__ __forceinline__ void ld_shared_64(uint32_t (&value)[2], SmemPointer smem, Site site = Site::here()) {
  emulation::load_shared(value, smem.address, 8, site, "ld_shared_64");
}

__device__ __forceinline__ void ld_shared_128(uint32_t (&value)[4], SmemPointer smem, Site site = Site::here()) {
  emulation::load_shared(value, smem.address, 16, site, "ld_shared_128");
}

__device__ __forceinline__ void st_shared_32(SmemPointer smem, uint32_t value, Site site = Site::here()) {
  emulation::store_shared(smem.address, &value, 4, site, "st_shared_32");
}

__device__ __forceinline__ void st_shared_float(SmemPointer smem, float value, Site site = Site::here()) {
  emulation::store_shared(smem.address, &value, 4, site, "st_shared_float");
}

__device__ __forceinline__ void st_shared_64(SmemPointer smem, const uint32_t (&value)[2], Site site = Site::here()) {
  emulation::store_shared(smem.address, value, 8, site, "st_shared_64");
}

__device__ __forceinline__ void st_shared_128(SmemPointer smem, const uint32_t (&value)[4], Site site = Site::here()) {
  emulation::store_shared(smem.address, value, 16, site, "st_shared_128");
}

__device__ __forceinline__ void prefetch_global(const void* gmem) { (void)gmem; }

__device__ __forceinline__ uint32_t ld_global_8(const void* gmem, Site site = Site::here()) {
  uint8_t value;
  emulation::load_global(&value, gmem, 1, site, "ld_global_8");
  return value;
}

__device__ __forceinline__ uint16_t ld_global_16(const void* gmem, Site site = Site::here()) {
  uint16_t value;
  emulation::load_global(&value, gmem, 2, site, "ld_global_16");
  return value;
}

__device__ __forceinline__ uint32_t ld_global_8_if(const void* gmem, bool is_read, Site site = Site::here()) {
  return is_read ? ld_global_8(gmem, site) : 0;
}

__device__ __forceinline__ uint32_t ld_global_16_if(const void* gmem, bool is_read, Site site = Site::here()) {
  return is_read ? ld_global_16(gmem, site) : 0;
}

__device__ __forceinline__ uint32_t ld_global_32(const void* gmem, Site site = Site::here()) {
  uint32_t value;
  emulation::load_global(&value, gmem, 4, site, "ld_global_32");
  return value;
}

__device__ __forceinline__ float ld_global_float(const float* gmem, Site site = Site::here()) {
  float value;
  emulation::load_global(&value, gmem, 4, site, "ld_global_float");
  return value;
}

__device__ __forceinline__ float4 ld_global_float4(const float* gmem, Site site = Site::here()) {
  float4 value;
  emulation::load_global(&value, gmem, 16, site, "ld_global_float4");
  return value;
}

__device__ __forceinline__ void ld_global_64(uint32_t (&value)[2], const void* gmem, Site site = Site::here()) {
  emulation::load_global(value, gmem, 8, site, "ld_global_64");
}

__device__ __forceinline__ void ld_global_128(uint32_t (&value)[4], const void* gmem, Site site = Site::here()) {
  emulation::load_global(value, gmem, 16, site, "ld_global_128");
}

__device__ __forceinline__ void st_global_16(void* gmem, uint16_t value, Site site = Site::here()) {
  emulation::store_global(gmem, &value, 2, site, "st_global_16");
}

__device__ __forceinline__ void st_global_32(void* gmem, uint32_t value, Site site = Site::here()) {
  emulation::store_global(gmem, &value, 4, site, "st_global_32");
}

__device__ __forceinline__ void st_global_float(float* gmem, float value, Site site = Site::here()) {
  emulation::store_global(gmem, &value, 4, site, "st_global_float");
}

__device__ __forceinline__ void st_global_64(void* gmem, const uint32_t (&value)[2], Site site = Site::here()) {
  emulation::store_global(gmem, value, 8, site, "st_global_64");
}

__device__ __forceinline__ void st_global_128(void* gmem, const uint32_t (&value)[4], Site site = Site::here()) {
  emulation::store_global(gmem, value, 16, site, "st_global_128");
}

}  // namespace flashmoe::ptx
