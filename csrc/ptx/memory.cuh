// Loads and stores of shared and global memory. Addresses must be aligned to the access width.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

// The block's dynamic shared memory, 1024-byte aligned (what a 128-byte swizzle needs).
__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  return shared_memory;
}

// Byte address in the shared window, as the instructions below take it.
__device__ __forceinline__ uint32_t smem_address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// A shared-memory address in one register. Loops that keep many of them use this instead of a 64-bit generic pointer;
// every wrapper below takes either.
struct SmemPointer {
  uint32_t address;

  SmemPointer() = default;
  __device__ __forceinline__ SmemPointer(const void* smem) : address(smem_address(smem)) {}
  __device__ __forceinline__ SmemPointer operator+(int bytes) const {
    SmemPointer moved;
    moved.address = address + bytes;
    return moved;
  }
  // Inverts bits of the address (dynamic shared memory starts at a multiple of 1024).
  __device__ __forceinline__ SmemPointer operator^(int bits) const {
    SmemPointer moved;
    moved.address = address ^ bits;
    return moved;
  }
};

__device__ __forceinline__ uint32_t smem_address(SmemPointer smem) { return smem.address; }

// gmem + bytes, as an addition that the compiler cannot merge with others: a chain of them keeps one pointer alive
// instead of one per link.
template <typename T>
__device__ __forceinline__ const T* advance_pointer(const T* gmem, int64_t bytes) {
  const T* moved;
  asm volatile("add.s64 %0, %1, %2;" : "=l"(moved) : "l"(gmem), "l"(bytes));
  return moved;
}

__device__ __forceinline__ uint32_t ld_shared_32(SmemPointer smem) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(smem_address(smem)) : "memory");
  return value;
}

__device__ __forceinline__ float ld_shared_float(SmemPointer smem) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(smem_address(smem)) : "memory");
  return value;
}

__device__ __forceinline__ float4 ld_shared_float4(SmemPointer smem) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(smem_address(smem))
               : "memory");
  return value;
}

__device__ __forceinline__ void ld_shared_64(uint32_t (&value)[2], SmemPointer smem) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(value[0]), "=r"(value[1])
               : "r"(smem_address(smem))
               : "memory");
}

__device__ __forceinline__ void ld_shared_128(uint32_t (&value)[4], SmemPointer smem) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(smem_address(smem))
               : "memory");
}

__device__ __forceinline__ void st_shared_32(SmemPointer smem, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem_address(smem)), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_float(SmemPointer smem, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem_address(smem)), "f"(value) : "memory");
}

__device__ __forceinline__ void st_shared_64(SmemPointer smem, const uint32_t (&value)[2]) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(smem_address(smem)), "r"(value[0]), "r"(value[1]) : "memory");
}

__device__ __forceinline__ void st_shared_128(SmemPointer smem, const uint32_t (&value)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(smem)), "r"(value[0]), "r"(value[1]),
               "r"(value[2]), "r"(value[3])
               : "memory");
}

// Prefetches the line into the L2 cache; no register waits for it. Any address will do.
__device__ __forceinline__ void prefetch_global(const void* gmem) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(gmem)));
}

// One byte, zero-extended.
__device__ __forceinline__ uint32_t ld_global_8(const void* gmem) {
  uint32_t value;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(gmem)) : "memory");
  return value;
}

__device__ __forceinline__ uint16_t ld_global_16(const void* gmem) {
  uint16_t value;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(value) : "l"(__cvta_generic_to_global(gmem)) : "memory");
  return value;
}

// Returns zero without an access if `is_read` is false.
__device__ __forceinline__ uint32_t ld_global_8_if(const void* gmem, bool is_read) {
  uint32_t value;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "setp.ne.u32 p, %2, 0;\n\t"
      "mov.u32 %0, 0;\n\t"
      "@p ld.global.u8 %0, [%1];\n\t"
      "}"
      : "=&r"(value)
      : "l"(__cvta_generic_to_global(gmem)), "r"(static_cast<uint32_t>(is_read))
      : "memory");
  return value;
}

__device__ __forceinline__ uint32_t ld_global_16_if(const void* gmem, bool is_read) {
  uint32_t value;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "setp.ne.u32 p, %2, 0;\n\t"
      "mov.u32 %0, 0;\n\t"
      "@p ld.global.u16 %0, [%1];\n\t"
      "}"
      : "=&r"(value)
      : "l"(__cvta_generic_to_global(gmem)), "r"(static_cast<uint32_t>(is_read))
      : "memory");
  return value;
}

__device__ __forceinline__ uint32_t ld_global_32(const void* gmem) {
  uint32_t value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(gmem)) : "memory");
  return value;
}

__device__ __forceinline__ float ld_global_float(const float* gmem) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(__cvta_generic_to_global(gmem)) : "memory");
  return value;
}

__device__ __forceinline__ float4 ld_global_float4(const float* gmem) {
  float4 value;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(__cvta_generic_to_global(gmem))
               : "memory");
  return value;
}

__device__ __forceinline__ void ld_global_64(uint32_t (&value)[2], const void* gmem) {
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
               : "=r"(value[0]), "=r"(value[1])
               : "l"(__cvta_generic_to_global(gmem))
               : "memory");
}

__device__ __forceinline__ void ld_global_128(uint32_t (&value)[4], const void* gmem) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "l"(__cvta_generic_to_global(gmem))
               : "memory");
}

__device__ __forceinline__ void st_global_16(void* gmem, uint16_t value) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(__cvta_generic_to_global(gmem)), "h"(value) : "memory");
}

__device__ __forceinline__ void st_global_32(void* gmem, uint32_t value) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(gmem)), "r"(value) : "memory");
}

__device__ __forceinline__ void st_global_float(float* gmem, float value) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(gmem)), "f"(value) : "memory");
}

__device__ __forceinline__ void st_global_64(void* gmem, const uint32_t (&value)[2]) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(gmem)), "r"(value[0]), "r"(value[1])
               : "memory");
}

__device__ __forceinline__ void st_global_128(void* gmem, const uint32_t (&value)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(gmem)), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}

}  // namespace flashmoe::ptx
