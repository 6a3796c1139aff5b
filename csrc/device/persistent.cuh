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
// Without a counter, rounds of one tile per block, back and forth: a block that had the longest tile of a round gets the
// shortest of the next. With one (zero at launch), blocks draw from it. Every block draws until it gets a number past
// the end, num_tiles draws in all, and the one that draws the last puts the counter back to zero for the next launch.
// (By reference: the kernel's parameter is loaded only where it is needed.)
__device__ __forceinline__ int next_tile_index(int32_t* const& counter_gmem, int num_tiles, int index) {
  const int blocks = ptx::grid_size();
  if (num_tiles <= blocks) return num_tiles;
  if (counter_gmem == nullptr) return index + 2 * (blocks - index % blocks) - 1;
  const int drawn = ptx::atomic_add_global(counter_gmem, 1);
  if (drawn == num_tiles - 1) ptx::st_global_32(counter_gmem, 0);
  return drawn + blocks;
}

// Where tiles differ in length, a block draws its next one when so many blocks of the stream are left to ask for: late, for who
// draws at its tile's start takes a long tile that others, done sooner, could begin; but not at the end, where the next tile's
// loads would wait for the answer.
constexpr int kDrawAhead = 3;

// A tile's coordinates, 16 bytes or a multiple, through shared memory; the barriers of `slot_smem` are the kernel's.
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
