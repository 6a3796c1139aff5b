// The producers: they issue the TMA loads, and pass tiles to the consumers.
#pragma once

#include "attention/backward/sm90/tile_coordinates.cuh"
#include "attention/backward/sm90/schedule.cuh"
#include "attention/backward/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/tma.cuh"

namespace flashmoe::attention::backward::sm90 {

// Loads kStreamRows rows from `row` on, slab by slab. Rows and columns outside the tensor become zeros.
template <typename Tile, typename Coordinates>
__device__ __forceinline__ void copy_stream(const Tile& tile, const ptx::TensorMap& map, ptx::Mbarrier* full, int row,
                                            const Coordinates& coordinates) {
#pragma unroll
  for (int slab = 0; slab < Tile::kNumSlabs; ++slab) {
    load_box(tile.slab(slab), map, full, slab * kSlabColumns, row, coordinates, ptx::CacheHint::kEvictLast);
  }
}

// Loads a block of one tensor, once its buffer is free.
template <typename Tile, typename Coordinates>
__device__ __forceinline__ void load_stream(const Tile& tile, const ptx::TensorMap& map, ptx::Mbarrier* full,
                                            ptx::Mbarrier* empty, int parity, int row, const Coordinates& coordinates) {
  ptx::mbarrier_wait(empty, parity ^ 1);
  ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
  copy_stream(tile, map, full, row, coordinates);
}

// Loads a block of both tensors, the first one before the second.
template <typename Spec, typename Coordinates>
__device__ __forceinline__ void load_block(const SharedMemory<Spec>& shared,
                                           const RingPosition<Spec::kFirstStages>& first,
                                           const RingPosition<Spec::kSecondStages>& second,
                                           const ptx::TensorMap& first_map, const ptx::TensorMap& second_map, int row,
                                           const Coordinates& first_at, const Coordinates& second_at) {
  ptx::Mbarrier* full = shared.first_full(first.stage);
  if constexpr (Spec::kIsPaired) {
    ptx::mbarrier_wait(shared.first_empty(first.stage), first.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, Spec::StreamTile::kBytes + Spec::StreamSecondTile::kBytes + Spec::kMaskBytes);
    copy_stream(shared.first(first.stage), first_map, full, row, first_at);
    copy_stream(shared.second(second.stage), second_map, full, row, second_at);
  } else {
    load_stream(shared.first(first.stage), first_map, full, shared.first_empty(first.stage), first.parity, row,
                first_at);
    load_stream(shared.second(second.stage), second_map, shared.second_full(second.stage),
                shared.second_empty(second.stage), second.parity, row, second_at);
  }
}

// Loads the 64 rows of both tensors for own tile `own`, and publishes the tile they belong to.
template <typename Spec, typename TileType, typename Coordinates>
__device__ __forceinline__ void load_own(const SharedMemory<Spec>& shared, const ptx::TensorMap& first_map,
                                         const ptx::TensorMap& second_map, int own, int parity, const TileType& tile,
                                         const Coordinates& first_at, const Coordinates& second_at) {
  ptx::Mbarrier* full = shared.own_full(own);
  const int row = tile.index * Spec::kOwnRows + own * 64;
  ptx::mbarrier_wait(shared.own_empty(own), parity ^ 1);
  publish_tile(shared.tile(own), tile);
  ptx::mbarrier_arrive(shared.tile_full(own));
  ptx::mbarrier_arrive_expect_tx(full, Spec::OwnTile::kBytes + Spec::OwnSecondTile::kBytes);
#pragma unroll
  for (int slab = 0; slab < Spec::OwnTile::kNumSlabs; ++slab) {
    load_box(shared.own_first(own).slab(slab), first_map, full, slab * kSlabColumns, row, first_at,
             ptx::CacheHint::kEvictFirst);
  }
#pragma unroll
  for (int slab = 0; slab < Spec::OwnSecondTile::kNumSlabs; ++slab) {
    load_box(shared.own_second(own).slab(slab), second_map, full, slab * kSlabColumns, row, second_at,
             ptx::CacheHint::kEvictFirst);
  }
}

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void end_work(const SharedMemory<Spec>& shared, int parity) {
#pragma unroll
  for (int own = 0; own < Spec::kNumOwnTiles; ++own) {
    ptx::mbarrier_wait(shared.own_empty(own), parity ^ 1);
    publish_tile(shared.tile(own), MaskTile<kMask>{-1, 0, 0});
    ptx::mbarrier_arrive(shared.tile_full(own));
  }
}

// For the dq kernel; runs on one thread. Per tile, with key blocks n-1 down to 0: K(n-1), V(n-1), then Q and dO of
// every warpgroup, then K(j), V(j) downwards.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void produce_keys(const BackwardParams& params, const SharedMemory<Spec>& shared,
                                             const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                             const ptx::TensorMap& v_map, const ptx::TensorMap& dout_map) {
  const int heads_per_kv = params.heads_q / params.heads_kv;
  const Schedule<Spec, kMask, true> schedule(params, params.seq_q, params.heads_q, params.seq_k, heads_per_kv);
  const int num_tiles = schedule.num_tiles();
  RingPosition<Spec::kFirstStages> key;
  RingPosition<Spec::kSecondStages> value;
  int own_parity = 0;

  for (int number = ptx::block_index(); number < num_tiles; own_parity ^= 1) {
    int next_number = 0;
    const Tile tile = schedule.tile(number);
    const DenseCoordinates stream{tile.head / heads_per_kv, tile.batch};
    const int first_row = tile.index * Spec::kOwnRows;
    const int last_block = key_blocks<Spec, kMask>(params, tile, first_row, first_row + Spec::kOwnRows).end - 1;
    const int draw_block = kMask == MaskKind::kCausal ? minimum(last_block, kDrawAhead) : last_block;
    for (int block = last_block; block >= 0; --block) {
      if (block == draw_block) next_number = next_tile_index(params.tile_counter, num_tiles, number);
      const int row = block * Spec::kStreamRows;
      load_block<Spec>(shared, key, value, k_map, v_map, row, stream, stream);
      key.advance();
      value.advance();
      if (block == last_block) {
        const DenseCoordinates own_at{tile.head, tile.batch};
#pragma unroll
        for (int own = 0; own < Spec::kNumOwnTiles; ++own) {
          load_own<Spec>(shared, q_map, dout_map, own, own_parity, tile, own_at, own_at);
        }
      }
    }
    number = next_number;
  }
  end_work<Spec, kMask>(shared, own_parity);
}

// The log-sum-exp and row_dot of the rows of one block, kStreamRows / 32 per lane, on their way to shared memory.
template <typename Spec>
struct Statistics {
  static constexpr int kRows = Spec::kStreamRows / 32;  // per lane
  float lse[kRows];
  float row_dot[kRows];

  // first: index of the head's first row among all rows; rows: the number of its rows.
  __device__ __forceinline__ void fetch(const BackwardParams& params, int64_t first, int rows, int block) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = block * Spec::kStreamRows + i * 32 + ptx::lane_index();
      const int64_t at = first + row;
      lse[i] = ptx::negative_infinity();
      row_dot[i] = 0.0f;
      if (row < rows) {
        lse[i] = ptx::ld_global_float(params.lse + at);
        row_dot[i] = ptx::ld_global_float(params.row_dot + at);
      }
    }
  }

  __device__ __forceinline__ void divide_row_dot(float by) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) row_dot[i] *= ptx::rcp_approx(by);
  }

  // A row without visible keys, or past the end, gets +inf: its P is exp2(finite - inf) = 0.
  __device__ __forceinline__ void store(unsigned char* smem) const {
    constexpr float kLog2e = 1.44269504088896340736f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = i * 32 + ptx::recompute(ptx::lane_index());  // recomputed: registers are few
      const float lse_log2 = lse[i] == ptx::negative_infinity() ? -ptx::negative_infinity() : lse[i] * kLog2e;
      unsigned char* row_smem = smem + 4 * statistics_index(at);
      ptx::st_shared_float(row_smem, lse_log2);
      ptx::st_shared_float(row_smem + 4 * Spec::kStreamRows, Spec::kStartsFromRowDot ? -row_dot[i] : row_dot[i]);
    }
  }
};

// The number of a block's first tile, and the next. With an ordered reduction all tiles are drawn from the counter:
// then only running blocks hold tiles, and a tile waits only for tiles drawn earlier, by blocks that are running too.
template <typename Spec>
__device__ __forceinline__ int draw_tile(int32_t* const& counter_gmem, int num_tiles) {
  const int drawn = ptx::atomic_add_global(counter_gmem, 1);
  // Every block draws until it gets a number past the end; the last draw resets the counter to zero for the next
  // launch.
  if (drawn == num_tiles + ptx::grid_size() - 1) ptx::st_global_32(counter_gmem, 0);
  return drawn;
}
template <typename Spec>
__device__ __forceinline__ int first_tile(int32_t* const& counter_gmem, int num_tiles) {
  if constexpr (!Spec::kOrdersReduction) return ptx::block_index();
  const int drawn = ptx::lane_index() == 0 ? draw_tile<Spec>(counter_gmem, num_tiles) : 0;
  return ptx::shuffle_index(drawn, 0);
}
template <typename Spec>
__device__ __forceinline__ int next_tile(int32_t* const& counter_gmem, int num_tiles, int number) {
  if constexpr (Spec::kOrdersReduction) return draw_tile<Spec>(counter_gmem, num_tiles);
  return next_tile_index(counter_gmem, num_tiles, number);
}

// For the dk, dv kernel; runs on one warp: its first lane issues the TMA loads, all lanes load the statistics. Per
// tile, for each query head of the group, with query blocks b up to n-1: Q(b), dO(b), then (once per tile) K and V of
// every warpgroup.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void produce_queries(const BackwardParams& params, const SharedMemory<Spec>& shared,
                                                const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                                const ptx::TensorMap& v_map, const ptx::TensorMap& dout_map) {
  const int heads_per_kv = params.heads_q / params.heads_kv;
  const KeySchedule<Spec, kMask, Spec::kOrdersReduction> schedule(params, params.seq_k, params.heads_kv,
                                                                  params.seq_q * heads_per_kv, 1);
  const int num_tiles = schedule.num_tiles();
  const int end_block = ceil_div(params.seq_q, Spec::kStreamRows);
  const bool is_first_lane = ptx::lane_index() == 0;
  RingPosition<Spec::kFirstStages> at;  // both rings have the same number of stages
  int own_parity = 0;
  Statistics<Spec> statistics;
  constexpr bool kInterleavesHeads = Spec::kOrdersReduction;  // a block of each head of the group, then the next block
  const auto block_at = [end_block](const Tile& tile, int begin, int i) {
    return kInterleavesHeads && is_descending<kMask>(tile) ? begin + end_block - 1 - i : i;
  };

  for (int number = first_tile<Spec>(params.tile_counter, num_tiles); number < num_tiles; own_parity ^= 1) {
    int next_number = 0;
    const Tile tile = schedule.tile(number);
    const int first_key = tile.index * Spec::kOwnRows;
    const int begin_block = query_blocks<Spec, kMask>(params, tile, first_key, first_key + 1).begin;
    const int first_head = tile.head * heads_per_kv;
    const int draw_head = kMask == MaskKind::kCausal && !kInterleavesHeads ? first_head + heads_per_kv - 1 : first_head;
    const int draw_block = kMask == MaskKind::kCausal ? maximum(begin_block, end_block - 1 - kDrawAhead) : begin_block;
    int head = first_head;
    int block = begin_block;
    bool own_is_loaded = false;
    statistics.fetch(params, first_statistic(params, tile, head), params.seq_q, block_at(tile, begin_block, block));
    while (kInterleavesHeads ? block < end_block : head < first_head + heads_per_kv) {
      if (is_first_lane) {
        if (block == draw_block && head == draw_head) {
          next_number = next_tile<Spec>(params.tile_counter, num_tiles, number);
        }
        const int row = block_at(tile, begin_block, block) * Spec::kStreamRows;
        const DenseCoordinates stream{head, tile.batch};
        load_block<Spec>(shared, at, at, q_map, dout_map, row, stream, stream);
        if (!own_is_loaded) {
          const DenseCoordinates own_at{tile.head, tile.batch};
#pragma unroll
          for (int own = 0; own < Spec::kNumOwnTiles; ++own) {
            load_own<Spec>(shared, k_map, v_map, own, own_parity, tile, own_at, own_at);
          }
        }
      }
      own_is_loaded = true;
      // Hazard: the statistics of this stage may still be read; the first lane has waited for that, the others have
      // not.
      ptx::warp_sync();
      statistics.store(shared.statistics(at.stage));
      ptx::mbarrier_arrive(shared.first_full(at.stage));
      at.advance();
      if constexpr (kInterleavesHeads) {
        if (++head == first_head + heads_per_kv) {
          head = first_head;
          ++block;
        }
      } else if (++block == end_block) {
        block = begin_block;
        ++head;
      }
      if (kInterleavesHeads ? block < end_block : head < first_head + heads_per_kv) {
        statistics.fetch(params, first_statistic(params, tile, head), params.seq_q, block_at(tile, begin_block, block));
      }
    }
    number = ptx::shuffle_index(next_number, 0);
  }
  if (is_first_lane) end_work<Spec, kMask>(shared, own_parity);
}

}  // namespace flashmoe::attention::backward::sm90
