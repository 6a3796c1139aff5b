// TMA coordinates of the rows of a tile's sequence and head.
#pragma once

#include "attention/backward/sm90/schedule.cuh"
#include "attention/ragged_tensor_map.h"
#include "ptx/tma.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm90 {

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
                                         int row, const RaggedPlace& coordinates, ptx::CacheHint hint) {
  ptx::tma_load_5d(smem, &map, full, column, kRaggedRows - coordinates.length + row, coordinates.head, coordinates.end,
                   kRaggedRows, hint);
}
__device__ __forceinline__ void store_box(const ptx::TensorMap& map, const void* smem, int column, int row,
                                          const RaggedPlace& coordinates) {
  ptx::tma_store_5d(&map, smem, column, kRaggedRows - coordinates.length + row, coordinates.head, coordinates.end,
                    kRaggedRows);
}

// `length` rows of a sequence of a tensor, from row `first` on; entry_rows: of that tensor.
__device__ __forceinline__ RaggedPlace ragged_coordinates(int entry_rows, int sequence, int head, int first,
                                                          int length) {
  return RaggedPlace{head, length, first + sequence * entry_rows + length};
}

// _read: rows past the sequence's last read as zeros. _stored, of a gradient: rows past the sequence's room are not written.
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
__device__ __forceinline__ RaggedPlace rows_read(int entry_rows, const VarlenTile& tile, int head) {
  return ragged_coordinates(entry_rows, tile.batch, head, tile.extents.first_row, tile.extents.row_count);
}
__device__ __forceinline__ RaggedPlace keys_read(int entry_rows, const VarlenTile& tile, int head) {
  return ragged_coordinates(entry_rows, tile.batch, head, tile.extents.first_key, tile.extents.key_count);
}
__device__ __forceinline__ RaggedPlace rows_stored(int entry_rows, const VarlenTile& tile) {
  return ragged_coordinates(entry_rows, tile.batch, tile.head, tile.extents.first_row, tile.extents.row_room);
}
__device__ __forceinline__ RaggedPlace keys_stored(int entry_rows, const VarlenTile& tile) {
  return ragged_coordinates(entry_rows, tile.batch, tile.head, tile.extents.first_key, tile.extents.key_room);
}

}  // namespace sm90
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
