// A tile of 16-bit elements in shared memory in the 128-byte swizzle, as TMA writes it and wgmma reads it.
//
// Slabs of 64 columns follow one another. In a slab a row is 128 bytes, 8 chunks of 16, and chunk c of row r is stored
// at c ^ (r % 8). (Tiles for mma.sync, whose rows are not cut into slabs: swizzle.cuh.)
#pragma once

#include "ptx/wgmma.cuh"

namespace flashmoe {

constexpr int kSlabColumns = 64;
constexpr int kSlabRowBytes = 128;
constexpr int kSwizzleBytes = 1024;  // the period of the swizzle: 8 rows

// A K-major operand: k runs along its rows, which are M or N of the product. k_step: where the 32 bytes of k of a step
// begin (16 elements of 16 bits, 32 of 8), from row `first_row` on, a multiple of 8.
template <int kRows>
struct KMajorOperand {
  static constexpr bool kIsTransposed = false;
  uint64_t descriptor;

  __device__ __forceinline__ uint64_t k_step(int step, int first_row = 0) const {
    return ptx::advance_smem_descriptor(descriptor,
                                        step / 4 * (kRows * kSlabRowBytes) + first_row * kSlabRowBytes + step % 4 * 32);
  }
};

// An MN-major operand, which wgmma calls transposed: k runs down its rows, and M or N along them. A step is 16 rows.
struct MnMajorOperand {
  static constexpr bool kIsTransposed = true;
  uint64_t descriptor;

  __device__ __forceinline__ uint64_t k_step(int step) const {
    return ptx::advance_smem_descriptor(descriptor, step * 16 * kSlabRowBytes);
  }
};

// [kColumns / 64][kRows][64], at a multiple of 1024 bytes.
template <int kRows, int kColumns>
struct SharedTile {
  static constexpr int kNumSlabs = kColumns / kSlabColumns;
  static constexpr int kSlabBytes = kRows * kSlabRowBytes;
  static constexpr int kBytes = kNumSlabs * kSlabBytes;
  static_assert(kColumns % kSlabColumns == 0, "a tile is cut into slabs of 64 columns, the width of the swizzle");
  static_assert(kSlabBytes % kSwizzleBytes == 0,
                "every slab starts at a multiple of 1024: a tile has a multiple of 8 rows");

  unsigned char* smem;

  __device__ __forceinline__ unsigned char* slab(int index) const { return smem + index * kSlabBytes; }
  // The 128 bytes of a slab's row, in swizzled order.
  __device__ __forceinline__ unsigned char* row(int row, int slab) const {
    return smem + slab * kSlabBytes + row * kSlabRowBytes;
  }
  // Columns 8 * chunk to 8 * chunk + 7 of a slab's row.
  __device__ __forceinline__ unsigned char* chunk(int row, int slab, int chunk) const {
    return smem + slab * kSlabBytes + row * kSlabRowBytes + (chunk ^ (row % 8)) * 16;
  }

  __device__ __forceinline__ KMajorOperand<kRows> k_major() const {
    return {ptx::make_smem_descriptor(smem, 0, kSwizzleBytes)};
  }
  __device__ __forceinline__ MnMajorOperand mn_major() const {
    return {ptx::make_smem_descriptor(smem, kSlabBytes, kSwizzleBytes)};
  }
};

}  // namespace flashmoe
