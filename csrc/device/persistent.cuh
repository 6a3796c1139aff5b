// Persistent grids: how a block gets its next tile, and how its producer hands a tile to its consumers.
//
// Tiles are numbered from 0; the kernel decides what a number means. A block's first tile is block_index().
#pragma once

#include "ptx/atomics.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {

// The tile after `index` of this block; num_tiles or more ends its work.
//
// Without a counter: rounds of one tile per block, back and forth, so that a block with the longest tile of a round
// gets the shortest of the next. With a counter (zero at launch), blocks draw from it. Every block draws until it gets
// a number past the end, num_tiles draws in all, and the last draw resets the counter for the next launch. (By
// reference: the kernel's parameter is loaded only where it is needed.)
__device__ __forceinline__ int next_tile_index(int32_t* const& counter_gmem, int num_tiles, int index) {
  const int blocks = ptx::grid_size();
  if (num_tiles <= blocks) return num_tiles;
  if (counter_gmem == nullptr) return index + 2 * (blocks - index % blocks) - 1;
  const int drawn = ptx::atomic_add_global(counter_gmem, 1);
  if (drawn == num_tiles - 1) ptx::st_global_32(counter_gmem, 0);
  return drawn + blocks;
}

// If tiles differ in length, a block draws its next tile when this many blocks of its stream are left to load. A
// draw at the tile's start could take a long tile that blocks done sooner could begin; at the end, the next tile's
// loads would wait for the draw.
constexpr int kDrawAhead = 3;

// Passes a tile's coordinates, a multiple of 16 bytes, through shared memory; the kernel guards `slot_smem`.
template <typename Tile>
__device__ __forceinline__ void publish_tile(unsigned char* slot_smem, const Tile& tile) {
  static_assert(sizeof(Tile) % 16 == 0, "a tile passes through shared memory in 16-byte stores");
  uint32_t words[sizeof(Tile) / 16][4];
  memcpy(words, &tile, sizeof(Tile));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Tile) / 16); ++i) ptx::st_shared_128(slot_smem + i * 16, words[i]);
}

template <typename Tile>
__device__ __forceinline__ Tile read_tile(const unsigned char* slot_smem) {
  static_assert(sizeof(Tile) % 16 == 0, "a tile passes through shared memory in 16-byte stores");
  uint32_t words[sizeof(Tile) / 16][4];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Tile) / 16); ++i) ptx::ld_shared_128(words[i], slot_smem + i * 16);
  Tile tile;
  memcpy(&tile, words, sizeof(Tile));
  return tile;
}

}  // namespace flashmoe
