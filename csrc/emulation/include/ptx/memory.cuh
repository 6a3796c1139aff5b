// Emulated: the signatures of csrc/ptx/memory.cuh plus the call site; a test holds the two against each other.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe {
namespace ptx {

using emulation::Site;

__device__ __forceinline__ unsigned char* dynamic_shared_memory() { return emulation::shared_window(); }

__device__ __forceinline__ uint32_t smem_address(const void* smem, Site site = Site::here()) {
  return emulation::shared_address(smem, site, "smem_address");
}

__device__ __forceinline__ uint32_t ld_shared_32(const void* smem, Site site = Site::here()) {
  uint32_t value;
  emulation::load_shared(&value, smem, 4, site, "ld_shared_32");
  return value;
}

__device__ __forceinline__ float ld_shared_float(const void* smem, Site site = Site::here()) {
  float value;
  emulation::load_shared(&value, smem, 4, site, "ld_shared_float");
  return value;
}

__device__ __forceinline__ void ld_shared_64(uint32_t (&value)[2], const void* smem, Site site = Site::here()) {
  emulation::load_shared(value, smem, 8, site, "ld_shared_64");
}

__device__ __forceinline__ void ld_shared_128(uint32_t (&value)[4], const void* smem, Site site = Site::here()) {
  emulation::load_shared(value, smem, 16, site, "ld_shared_128");
}

__device__ __forceinline__ void st_shared_32(void* smem, uint32_t value, Site site = Site::here()) {
  emulation::store_shared(smem, &value, 4, site, "st_shared_32");
}

__device__ __forceinline__ void st_shared_float(void* smem, float value, Site site = Site::here()) {
  emulation::store_shared(smem, &value, 4, site, "st_shared_float");
}

__device__ __forceinline__ void st_shared_64(void* smem, const uint32_t (&value)[2], Site site = Site::here()) {
  emulation::store_shared(smem, value, 8, site, "st_shared_64");
}

__device__ __forceinline__ void st_shared_128(void* smem, const uint32_t (&value)[4], Site site = Site::here()) {
  emulation::store_shared(smem, value, 16, site, "st_shared_128");
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

}  // namespace ptx
}  // namespace flashmoe
