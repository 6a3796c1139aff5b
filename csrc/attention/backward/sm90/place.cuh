// Where the rows of a tile's entry and head lie, for the copy engine.
#pragma once

#include "attention/backward/sm90/schedule.cuh"
#include "attention/ragged_tensor_map.h"
#include "ptx/tma.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm90 {

struct DensePlace {
  int head;
  int batch;
};

__device__ __forceinline__ void load_box(void* smem, const ptx::TensorMap& map, ptx::Mbarrier* full, int column,
                                         int row, const DensePlace& place, ptx::CacheHint hint) {
  ptx::tma_load_4d(smem, &map, full, column, row, place.head, place.batch, hint);
}
__device__ __forceinline__ void store_box(const ptx::TensorMap& map, const void* smem, int column, int row,
                                          const DensePlace& place) {
  ptx::tma_store_4d(&map, smem, column, row, place.head, place.batch);
}

__device__ __forceinline__ void load_box(void* smem, const ptx::TensorMap& map, ptx::Mbarrier* full, int column,
                                         int row, const RaggedPlace& place, ptx::CacheHint hint) {
  ptx::tma_load_5d(smem, &map, full, column, kRaggedRows - place.length + row, place.head, place.end, kRaggedRows,
                   hint);
}
__device__ __forceinline__ void store_box(const ptx::TensorMap& map, const void* smem, int column, int row,
                                          const RaggedPlace& place) {
  ptx::tma_store_5d(&map, smem, column, kRaggedRows - place.length + row, place.head, place.end, kRaggedRows);
}

// `length` rows of an entry of a tensor, from row `first` on; sequence_rows: of that tensor.
__device__ __forceinline__ RaggedPlace ragged_place(int sequence_rows, int entry, int head, int first, int length) {
  return RaggedPlace{head, length, first + entry * sequence_rows + length};
}

// Of what is read: rows past the entry's last become zeros. Of a gradient: rows past what the entry has room for stay.
__device__ __forceinline__ DensePlace rows_read(int, const Tile& tile, int head) {
  return DensePlace{head, tile.batch};
}
__device__ __forceinline__ DensePlace keys_read(int, const Tile& tile, int head) {
  return DensePlace{head, tile.batch};
}
__device__ __forceinline__ DensePlace rows_stored(int, const Tile& tile) { return DensePlace{tile.head, tile.batch}; }
__device__ __forceinline__ DensePlace keys_stored(int, const Tile& tile) { return DensePlace{tile.head, tile.batch}; }
__device__ __forceinline__ RaggedPlace rows_read(int sequence_rows, const BandTile& tile, int head) {
  return ragged_place(sequence_rows, tile.batch, head, tile.extents.first_row, tile.extents.row_count);
}
__device__ __forceinline__ RaggedPlace keys_read(int sequence_rows, const BandTile& tile, int head) {
  return ragged_place(sequence_rows, tile.batch, head, tile.extents.first_key, tile.extents.key_count);
}
__device__ __forceinline__ RaggedPlace rows_stored(int sequence_rows, const BandTile& tile) {
  return ragged_place(sequence_rows, tile.batch, tile.head, tile.extents.first_row, tile.extents.row_room);
}
__device__ __forceinline__ RaggedPlace keys_stored(int sequence_rows, const BandTile& tile) {
  return ragged_place(sequence_rows, tile.batch, tile.head, tile.extents.first_key, tile.extents.key_room);
}

}  // namespace sm90
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
