// TMA coordinates of the rows of a tile's sequence and head.
#pragma once

#include "attention/backward/sm90/schedule.cuh"
#include "attention/ragged_tensor_map.h"
#include "ptx/tma.cuh"

namespace flashmoe::attention::backward::sm90 {

struct DenseCoordinates {
  int head;
  int batch;
};

__device__ __forceinline__ void load_box(void* smem, const ptx::TensorMap& map, ptx::Mbarrier* full, int column,
                                         int row, const DenseCoordinates& coordinates, ptx::CacheHint hint) {
  ptx::tma_load_4d(smem, &map, full, column, row, coordinates.head, coordinates.batch, hint);
}
__device__ __forceinline__ void store_box(const ptx::TensorMap& map, const void* smem, int column, int row,
                                          const DenseCoordinates& coordinates) {
  ptx::tma_store_4d(&map, smem, column, row, coordinates.head, coordinates.batch);
}

__device__ __forceinline__ void load_box(void* smem, const ptx::TensorMap& map, ptx::Mbarrier* full, int column,
                                         int row, const RaggedCoordinates& coordinates, ptx::CacheHint hint) {
  ptx::tma_load_5d(smem, &map, full, column, kRaggedRows - coordinates.length + row, coordinates.head, coordinates.end,
                   kRaggedRows, hint);
}
__device__ __forceinline__ void store_box(const ptx::TensorMap& map, const void* smem, int column, int row,
                                          const RaggedCoordinates& coordinates) {
  ptx::tma_store_5d(&map, smem, column, kRaggedRows - coordinates.length + row, coordinates.head, coordinates.end,
                    kRaggedRows);
}

// `length` rows of a sequence of a tensor, from row `first` on; sequence_rows: that of the tensor.
__device__ __forceinline__ RaggedCoordinates ragged_coordinates(int sequence_rows, int sequence, int head, int first,
                                                                int length) {
  return RaggedCoordinates{head, length, first + sequence * sequence_rows + length};
}

// _read: rows past the sequence's last read as zeros. _stored, for a gradient: rows that the tensor has no room for are
// not written.
__device__ __forceinline__ DenseCoordinates rows_read(int, const Tile& tile, int head) {
  return DenseCoordinates{head, tile.batch};
}
__device__ __forceinline__ DenseCoordinates keys_read(int, const Tile& tile, int head) {
  return DenseCoordinates{head, tile.batch};
}
__device__ __forceinline__ DenseCoordinates rows_stored(int, const Tile& tile) {
  return DenseCoordinates{tile.head, tile.batch};
}
__device__ __forceinline__ DenseCoordinates keys_stored(int, const Tile& tile) {
  return DenseCoordinates{tile.head, tile.batch};
}
__device__ __forceinline__ RaggedCoordinates rows_read(int sequence_rows, const VarlenTile& tile, int head) {
  return ragged_coordinates(sequence_rows, tile.batch, head, tile.extents.first_row, tile.extents.row_count);
}
__device__ __forceinline__ RaggedCoordinates keys_read(int sequence_rows, const VarlenTile& tile, int head) {
  return ragged_coordinates(sequence_rows, tile.batch, head, tile.extents.first_key, tile.extents.key_count);
}
__device__ __forceinline__ RaggedCoordinates rows_stored(int sequence_rows, const VarlenTile& tile) {
  return ragged_coordinates(sequence_rows, tile.batch, tile.head, tile.extents.first_row, tile.extents.row_room);
}
__device__ __forceinline__ RaggedCoordinates keys_stored(int sequence_rows, const VarlenTile& tile) {
  return ragged_coordinates(sequence_rows, tile.batch, tile.head, tile.extents.first_key, tile.extents.key_room);
}

}  // namespace flashmoe::attention::backward::sm90
