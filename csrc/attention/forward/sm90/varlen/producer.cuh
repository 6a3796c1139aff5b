// The producing warp of the varlen kernels: it finds tiles, asks the copy engine for Q, K and V, and hands tiles to the consumers. All
// lanes walk together: over the entries of the batch, 32 at a time, and over the pages of a key block, one box of rows for each.
#pragma once

#include "attention/forward/sm90/spec.cuh"
#include "attention/forward/sm90/varlen/schedule.cuh"
#include "attention/sequences.cuh"
#include "device/persistent.cuh"
#include "device/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

template <typename Spec>
struct VarlenProducer {
  const ForwardParams& params;
  const SharedMemory<Spec> shared;
  const ptx::TensorMap& q_map;
  const ptx::TensorMap& k_map;
  const ptx::TensorMap& v_map;
  const int lane;
  const int box_rows;                  // as page_box_rows in tensor_map.h says; without pages a box is a whole block
  RingPosition<Spec::kNumStages> key;  // and of V: both rings turn once a block
  RingPosition<Spec::kNumQueryStages> query;
  int tail_parity = 0;
  int tail_stage = -1;  // of V; -1: none is under way
  int tail_row = 0;     // the first of its rows that is no key of the entry

  __device__ __forceinline__ VarlenProducer(const ForwardParams& params_, const SharedMemory<Spec>& shared_,
                                            const ptx::TensorMap& q_map_, const ptx::TensorMap& k_map_,
                                            const ptx::TensorMap& v_map_)
      : params(params_),
        shared(shared_),
        q_map(q_map_),
        k_map(k_map_),
        v_map(v_map_),
        lane(ptx::lane_index()),
        box_rows(rows_of_box(params_.entries)) {}

  static __device__ __forceinline__ int rows_of_box(const Batch& entries) {
    const int both = entries.page_size | Spec::kBlockN;
    return entries.block_table == nullptr ? Spec::kBlockN : both & -both;
  }

  // The page of this lane's box of a key block; unused without pages. Boxes past the entry's last key are asked for as well, whatever
  // page 0 holds: scores there are masked, and V is cleared.
  __device__ __forceinline__ int find_page(const VarlenTile& tile, int block) const {
    const int index = block * Spec::kBlockN + lane * box_rows;
    const bool is_there = params.entries.block_table != nullptr && lane * box_rows < Spec::kBlockN && index < tile.keys;
    return is_there ? tile.sequence(params).page_of(index) : 0;
  }

  // Where the keys of a block are: in a tensor by row, or in pages, of which each lane knows one.
  struct Place {
    int row;  // of the first key, in the tensor or in its page
    int page;
    int kv_head;
  };
  __device__ __forceinline__ Place find_block(const VarlenTile& tile, int first_key, int kv_head, int block) const {
    const int row = block * Spec::kBlockN;
    if (params.entries.block_table != nullptr)
      return Place{row % params.entries.page_size, find_page(tile, block), kv_head};
    return Place{first_key + row, params.entries.cu_seqlens_k == nullptr ? tile.batch : 0, kv_head};
  }

  // By one elected thread: TMA takes its operands from uniform registers, and where the compiler cannot see that one thread alone
  // asks, it makes a loop over lanes of every load.
  __device__ __forceinline__ void load_box(unsigned char* smem, const ptx::TensorMap& map, ptx::Mbarrier* full, int row,
                                           int kv_head, int page) const {
#pragma unroll
    for (int slab = 0; slab < Spec::kNumSlabs; ++slab) {
      ptx::tma_load_4d(smem + slab * Spec::kKeySlabBytes, &map, full, slab * 64, row, kv_head, page,
                       ptx::CacheHint::kEvictLast);
    }
  }

  // One stage of K or V.
  __device__ __forceinline__ void load_keys(unsigned char* smem, const ptx::TensorMap& map, ptx::Mbarrier* full,
                                            ptx::Mbarrier* empty, int parity, const Place& place) const {
    const bool has_pages = params.entries.block_table != nullptr;
    if (ptx::elect_one()) {
      ptx::mbarrier_wait(empty, parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Spec::kKeyBytes);
      if (!has_pages) load_box(smem, map, full, place.row, place.kv_head, place.page);
    }
    if (!has_pages) return;
    int row = place.row;
    for (int box = 0; box * box_rows < Spec::kBlockN; ++box) {
      const int page = ptx::shuffle_index(place.page, box);
      if (ptx::elect_one()) load_box(smem + box * box_rows * 128, map, full, row, place.kv_head, page);
      row += box_rows;
      if (row >= params.entries.page_size) row = 0;
    }
  }
  __device__ __forceinline__ void load_key(const Place& place) {
    load_keys(shared.key(key.stage), k_map, shared.key_full(key.stage), shared.key_empty(key.stage), key.parity, place);
  }
  // V of a block that ends past the keys arrives at a barrier of the producer's own, which finish_tail passes on.
  __device__ __forceinline__ void load_value(const Place& place, int keys_left) {
    const bool has_tail = keys_left < Spec::kBlockN;
    load_keys(shared.value(key.stage), v_map, has_tail ? shared.tail_full() : shared.value_full(key.stage),
              shared.value_empty(key.stage), key.parity, place);
    if (has_tail) {
      tail_stage = key.stage;
      tail_row = maximum(0, keys_left);
    }
    key.advance();
  }

  // Rows of V past the keys may hold anything, NaN among it, and P = 0 times NaN is NaN: they become zeros.
  __device__ __forceinline__ void finish_tail() {
    if (tail_stage < 0) return;
    ptx::warp_sync();  // the first lane has asked for V; the others need not poll meanwhile
    ptx::mbarrier_wait(shared.tail_full(), tail_parity);
    tail_parity ^= 1;
    unsigned char* smem = shared.value(tail_stage);
    const uint32_t zeros[4] = {0, 0, 0, 0};
    constexpr int kRowsAtOnce = 32 / 8;
    for (int row = tail_row + lane / 8; row < Spec::kBlockN; row += kRowsAtOnce) {
#pragma unroll
      for (int slab = 0; slab < Spec::kNumSlabs; ++slab) {
        ptx::st_shared_128(smem + slab * Spec::kKeySlabBytes + row * 128 + lane % 8 * 16, zeros);
      }
    }
    // Hazard: the tensor cores read V before these stores are visible to them.
    ptx::fence_proxy_async_shared();
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(shared.value_full(tail_stage));
    tail_stage = -1;
  }

  // The rows of Q of one consumer warpgroup, if it has any, and the tile that they belong to.
  __device__ __forceinline__ void load_query(int consumer, const VarlenTile& tile) const {
    if (!ptx::elect_one()) return;
    ptx::Mbarrier* full = shared.query_full(query.stage, consumer);
    ptx::mbarrier_wait(shared.query_empty(query.stage, consumer), query.parity ^ 1);
    publish_tile(shared.tile(query.stage, consumer), tile);
    const int row = tile.m_block * Spec::kBlockM + consumer * 64;
    if (row >= tile.rows) {
      ptx::mbarrier_arrive(full);
      return;
    }
    const bool is_ragged = params.entries.cu_seqlens_q != nullptr;
    ptx::mbarrier_arrive_expect_tx(full, Spec::kQueryBytes);
#pragma unroll
    for (int slab = 0; slab < Spec::kNumSlabs; ++slab) {
      ptx::tma_load_4d(shared.query(query.stage, consumer) + slab * Spec::kQuerySlabBytes, &q_map, full, slab * 64,
                       tile.first_row + row, tile.head, is_ragged ? 0 : tile.batch, ptx::CacheHint::kEvictFirst);
    }
  }

  // As for dense tensors: K(n-1), Q of warpgroup 0, V(n-1), Q of the others, then K(j), V(j) downwards.
  __device__ __forceinline__ void load_tile(const VarlenTile& tile, int num_tiles, int index, int& next_index) {
    const KeyRange& range = tile.blocks;
    const int first_key = params.entries.block_table == nullptr ? key_extent(params, tile.batch).first : 0;
    const int kv_head = tile.head / heads_per_key_head(params);
    const int last_block = range.end - 1;
    const int draw_block = minimum(last_block, range.begin + kDrawAhead);
    const auto draw = [&]() {
      if (lane == 0) next_index = next_tile_index(params.tile_counter, num_tiles, index);
    };
    if (last_block <= draw_block) draw();
    Place place = find_block(tile, first_key, kv_head, last_block);
    load_key(place);
    load_query(0, tile);
    load_value(place, tile.keys - last_block * Spec::kBlockN);
#pragma unroll
    for (int consumer = 1; consumer < Spec::kNumConsumers; ++consumer) load_query(consumer, tile);
    for (int block = last_block - 1; block >= range.begin; --block) {
      if (block == draw_block) draw();
      place = find_block(tile, first_key, kv_head, block);
      load_key(place);
      finish_tail();
      load_value(place, Spec::kBlockN);
    }
    finish_tail();
  }

  __device__ __forceinline__ void run() {
    EntryWalk<Spec> walk(params);
    const int num_tiles = walk.count_tiles();
    for (int index = ptx::block_index(); index < num_tiles; query.advance()) {
      const VarlenTile tile = decode_tile<Spec>(params, walk, index);
      int next_index = 0;
      load_tile(tile, num_tiles, index, next_index);
      index = ptx::shuffle_index(next_index, 0);
    }
    if (lane != 0) return;
#pragma unroll
    for (int consumer = 0; consumer < Spec::kNumConsumers; ++consumer) {
      ptx::mbarrier_wait(shared.query_empty(query.stage, consumer), query.parity ^ 1);
      publish_tile(shared.tile(query.stage, consumer), VarlenTile{-1, 0, 0, 0, 0, 0, KeyRange{0, 0}});
      ptx::mbarrier_arrive(shared.query_full(query.stage, consumer));
    }
  }
};

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
