// Grouped products of e4m3 operands with scales, plain and gated, for sm_90a: producer, schedule and stores are those
// of the 16-bit products, to which two values are one element; a stage's 128 bytes of a row are one scale block.
//
// Tensor cores sum the 128 k of a block; that partial sum times both scales is added to fp32 sums. Partial sums are
// computed for 128 columns at a time, 64 registers, so that sums and partial sums fit; the other consumer's products
// keep the tensor cores busy meanwhile. For a tile with at most 64 rows both consumers take these rows, with 128 of the
// weight rows each: when weights are the bottleneck, they are read as fast as they arrive. A row's bits depend only on
// k, as in mainloop.cuh.
#pragma once

#include "moe/grouped_gemm/sm90/grouped_gemm_gated.cuh"
#include "moe/params/scaled.h"
#include "moe/quantize/scale.cuh"
#include "ptx/e4m3.cuh"

namespace flashmoe::moe::sm90 {

template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kOutputSlabs>
using ScaledGemmSpec = TileSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs, false, false>;

// After the barriers: the largest magnitudes of 64 rows, as found by each consumer.
template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kOutputSlabs>
struct ScaledGatedGemmSpec : TileSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs, true, true> {
  using Tile = TileSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs, true, true>;
  static constexpr int kLargestOffset = Tile::kSharedBytes;
  static constexpr int kSharedBytes = kLargestOffset + Tile::kNumConsumers * 64 * 4;
};

// A consumer's share of a tile: its rows, and which halves of the columns.
template <typename Spec>
struct ScaledTile {
  WarpgroupTile<Spec> wg_tile;
  int first_half;  // 0, or 1 if only the second 128 columns are this consumer's
  bool is_halved;  // both consumers have the same 64 rows, and 128 columns each

  __device__ __forceinline__ ScaledTile(const Tile& tile, int consumer) {
    is_halved = tile.end_row - tile.first_row <= 64;
    wg_tile = warpgroup_tile<Spec>(tile, is_halved ? 0 : consumer);
    first_half = is_halved ? consumer : 0;
  }
};

// The scales that a thread needs, one block of k at a time: those of its two rows, 8 apart, and of two blocks of weight
// rows: gate and up, or the 128 columns from `first_half` on and the 128 after them. Found while the previous tile is
// finished: first the slots, which are waited for only when their tokens' scales are loaded.
template <typename Spec>
struct Scales {
  const float* row_gmem[2];
  const float* weight_gmem[2];
  int source_row[2];  // a row, or its slot
  bool is_row[2];     // whether the row belongs to the expert
  float row[2];
  float weight[2];

  __device__ __forceinline__ void find(const ScaledGemmParams& params, const WarpgroupTile<Spec>& wg_tile) {
    const int thread_row = ptx::warp_index() % 4 * 16 + ptx::lane_index() / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      is_row[r] = thread_row + 8 * r < wg_tile.rows;
      source_row[r] = is_row[r] ? wg_tile.row + thread_row + 8 * r : wg_tile.row;
      if constexpr (Spec::kGathersA)
        source_row[r] = static_cast<int>(ptx::ld_global_32(params.gemm.a_slots + source_row[r]));
    }
  }

  // After find: loads the first block's scales.
  __device__ __forceinline__ void load_first(const ScaledGemmParams& params, const WarpgroupTile<Spec>& wg_tile,
                                             int blocks, int first_half) {
    const GemmParams& gemm = params.gemm;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int scaled_row = Spec::kGathersA ? source_row[r] / gemm.top_k : source_row[r];
      row_gmem[r] = params.a_scale + static_cast<int64_t>(scaled_row) * blocks;
    }
    const int count = ceil_div(gemm.n, kScaleBlock);
    // A tile may lack its last 128 columns.
    const int first =
        Spec::kIsGated ? wg_tile.column / kScaleBlock : minimum(wg_tile.column / kScaleBlock + first_half, count - 1);
    const int second = Spec::kIsGated ? first + count / 2 : minimum(first + 1, count - 1);
    const float* of_expert = params.b_scale + static_cast<int64_t>(wg_tile.expert) * count * blocks;
    weight_gmem[0] = of_expert + static_cast<int64_t>(first) * blocks;
    weight_gmem[1] = of_expert + static_cast<int64_t>(second) * blocks;
    load(0);
  }

  __device__ __forceinline__ void load(int block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row[i] = ptx::ld_global_float(row_gmem[i] + block);
      weight[i] = ptx::ld_global_float(weight_gmem[i] + block);
    }
  }
};

// Named barriers of both consumers, 256 threads, in addition to those of device/named_barriers.cuh.
enum class ScaledBarrier : int {
  kLargest = 3,  // hazard: the other's maxima are read before they are written, or overwritten before they are read
  kOrder = 4,    // and 5: consumer 0 or 1 may issue products
};

template <typename Spec>
struct ScaledMainloop {
  static constexpr int kPartial = 64;  // registers for 128 columns
  static_assert(Spec::kAccumulators == 2 * kPartial, "two halves of 128 columns");

  Mainloop<Spec, Weights::kNk> mainloop;

  __device__ __forceinline__ ScaledMainloop(const SharedMemory<Spec>& smem, int consumer) : mainloop(smem, consumer) {}

  // Issues four products of 64 rows by 128 columns by 32 k.
  __device__ __forceinline__ void issue(float (&partial)[kPartial], int slab, int half) const {
    const int stage = mainloop.state.stage;
    const auto a = typename Spec::ATile{mainloop.smem.a(stage) + slab * Spec::kSlabBytes}.k_major();
    const auto b =
        SharedTile<Spec::kBlockN, Spec::kBlockK>{mainloop.smem.b(stage) + half * (Spec::kBBytes / 2)}.k_major();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma_e4m3_n128(partial, a.k_step(step), b.k_step(step), step == 0 ? 0 : 1);
    }
    ptx::wgmma_commit();
  }

  // The sums of the 64 rows of `slab` with kHalves * 128 columns, from half `first_half` on. With two halves the other
  // consumer multiplies its own rows of the tile, and the consumers issue products alternately. Otherwise both could
  // wait for their products and then both add, while the tensor cores idle.
  template <int kHalves, typename BlockScales>
  __device__ __forceinline__ void multiply(float (&accum)[kHalves * kPartial], BlockScales& scales, int slab,
                                           int first_half, int blocks) {
#pragma unroll
    for (int i = 0; i < kHalves * kPartial; ++i) accum[i] = 0.0f;
    if constexpr (kHalves == 2) {
      if (slab == 1)
        ptx::named_barrier_arrive(barrier_id(ScaledBarrier::kOrder, 0), 256);  // the other consumer issues first
    }
    for (int block = 0; block < blocks; ++block) {
      // [row][gate, up; or half]
      const float factors[2][2] = {{scales.row[0] * scales.weight[0], scales.row[0] * scales.weight[1]},
                                   {scales.row[1] * scales.weight[0], scales.row[1] * scales.weight[1]}};
      mainloop.wait_full();
      float partial[kPartial];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if constexpr (kHalves == 2) ptx::named_barrier_sync(barrier_id(ScaledBarrier::kOrder, slab), 256);
        issue(partial, slab, first_half + half);
        if constexpr (kHalves == 2) {
          const bool is_last = slab == 1 && half == 1 && block + 1 == blocks;
          if (!is_last) ptx::named_barrier_arrive(barrier_id(ScaledBarrier::kOrder, 1 - slab), 256);
        }
        if (half == 0 && block + 1 < blocks) scales.load(block + 1);
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_operands(partial);
        if (half == kHalves - 1) mainloop.release(mainloop.state.stage);
#pragma unroll
        for (int j = 0; j < kPartial; ++j) {
          // Sixteen in a row have the same factor: it is read once.
          const int columns = j / 32, row = j / 16 % 2, i = columns * 32 + j % 16 / 2 * 4 + row * 2 + j % 2;
          const float factor = factors[row][Spec::kIsGated ? columns : half];
          accum[half * kPartial + i] = ptx::fma_rn(partial[i], factor, accum[half * kPartial + i]);
        }
      }
      mainloop.state.advance();
    }
  }
};

// Writes kChunks * 16 columns of the result in e4m3. This thread has, of each row, the pairs 4j + lane % 4: `pair(j)`,
// j below 2 * kChunks, two values in 16 bits. Lanes pair up as in write_paired_slab.
template <int kChunks, typename Pair>
__device__ __forceinline__ void write_e4m3_row(unsigned char* row_smem, int row, Pair pair) {
  const int lane = ptx::lane_index();
  const bool is_odd = lane % 2 != 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const uint32_t first = pair(2 * chunk), second = pair(2 * chunk + 1);
    const uint32_t other = ptx::shuffle_xor(is_odd ? first : second, 1);
    const uint32_t word = is_odd ? other | second << 16 : first | other << 16;
    ptx::st_shared_32(row_smem + (chunk ^ row % 8) * 16 + (lane % 2 * 2 + lane % 4 / 2) * 4, word);
  }
}

// Stores 16-bit results of kHalves * 128 columns, from half `first_half` on.
template <typename Spec>
struct ScaledEpilogue {
  using Element = typename Spec::Element;
  const GemmParams& params;
  const ptx::TensorMap& d_map;
  const int columns;
  OutputSlabs<Spec> slabs;

  __device__ __forceinline__ ScaledEpilogue(const ScaledGemmParams& params_, const SharedMemory<Spec>& smem,
                                            int consumer, const ptx::TensorMap& d_map_)
      : ScaledEpilogue(params_.gemm, smem, consumer, d_map_, params_.gemm.n) {}
  __device__ __forceinline__ ScaledEpilogue(const GemmParams& params_, const SharedMemory<Spec>& smem, int consumer,
                                            const ptx::TensorMap& d_map_, int columns_)
      : params(params_), d_map(d_map_), columns(columns_), slabs(smem, consumer) {}

  template <int kHalves, typename Between>
  __device__ __forceinline__ void store(const WarpgroupTile<Spec>& wg_tile, float (&accum)[kHalves * 64],
                                        int first_half, Between between) {
    between();
    const SlabTarget to{d_map, params.d, params.d_stride, columns, 0};
#pragma unroll
    for (int slab = 0; slab < 2 * kHalves; ++slab) {
      const int column = wg_tile.column + first_half * 128 + slab * 64;
      if (column >= columns) break;
      write_slab<Element>(slabs.acquire(), accum + 32 * slab);
      slabs.store(to, wg_tile.row, wg_tile.rows, column);
    }
  }

  __device__ __forceinline__ void finish() const { slabs.finish(); }
};

// Stores activation(z) of kHalves * 64 columns, from half `first_half` on, as e4m3 with one scale per row and 128
// columns; before it z, if there is a map for it.
template <typename Spec, typename... PreactivationMap>
struct ScaledGatedEpilogue {
  static constexpr bool kKeepsPreactivation = sizeof...(PreactivationMap) == 1;
  const ScaledGemmParams& params;
  const ptx::TensorMap& d_map;
  const ptx::TensorMap& z_map;
  OutputSlabs<Spec> slabs;

  __device__ __forceinline__ ScaledGatedEpilogue(const ScaledGemmParams& params_, const SharedMemory<Spec>& smem,
                                                 int consumer, const ptx::TensorMap& d_map_,
                                                 const PreactivationMap&... z_map_)
      : params(params_), d_map(d_map_), z_map(first_of(z_map_..., d_map_)), slabs(smem, consumer) {}

  static __device__ __forceinline__ const ptx::TensorMap& first_of(const ptx::TensorMap& first) { return first; }
  static __device__ __forceinline__ const ptx::TensorMap& first_of(const ptx::TensorMap& first, const ptx::TensorMap&) {
    return first;
  }

  // Two slabs per 64 columns: gate and up.
  template <int kHalves>
  __device__ __forceinline__ void store_preactivation(const WarpgroupTile<Spec>& wg_tile,
                                                      const float (&accum)[kHalves * 64], int first_half) {
    const SlabTarget to{z_map, params.gemm.preactivation, params.gemm.n, params.gemm.n, 0};
#pragma unroll
    for (int slab = 0; slab < 2 * kHalves; ++slab) {
      write_slab<typename Spec::Element>(slabs.acquire(), accum + 32 * slab);
      const int column = wg_tile.column + 64 * (first_half + slab / 2);
      slabs.store(to, wg_tile.row, wg_tile.rows, slab % 2 == 0 ? column : column + params.gemm.n / 2);
    }
  }

  // Accumulators 64s + i, i below 32: columns 64s + 8 (i / 4) + 2 (lane % 4) + i % 2 of row (i / 2) % 2.
  template <int kHalves>
  __device__ __forceinline__ void activate(float (&accum)[kHalves * 64]) const {
    with_activation(params.gemm.activation, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < kHalves * 32; ++i) {
        const int gate = i / 32 * 64 + i % 32;
        accum[gate] = activation.forward(accum[gate], accum[gate + 32]);
      }
    });
  }

  // The largest magnitudes of the thread's two rows, over all 128 columns.
  template <int kHalves>
  __device__ __forceinline__ void find_largest(float (&largest)[2], const float (&accum)[kHalves * 64], int row) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = 0.0f;
#pragma unroll
      for (int i = 0; i < kHalves * 16; ++i) {
        largest[r] = fmaxf(largest[r], fabsf(accum[i / 16 * 64 + i % 16 / 2 * 4 + 2 * r + i % 2]));
      }
      largest[r] = fmaxf(largest[r], ptx::shuffle_xor(largest[r], 1));  // the four lanes of the row
      largest[r] = fmaxf(largest[r], ptx::shuffle_xor(largest[r], 2));
    }
    if constexpr (kHalves == 1) {
      float* mine = reinterpret_cast<float*>(slabs.smem.base + Spec::kLargestOffset) + slabs.consumer * 64 + row;
      const float* other = mine + (slabs.consumer == 0 ? 64 : -64);
      if (ptx::lane_index() % 4 == 0) {
        ptx::st_shared_float(mine, largest[0]);
        ptx::st_shared_float(mine + 8, largest[1]);
      }
      ptx::named_barrier_sync(barrier_id(ScaledBarrier::kLargest), 256);  // the other consumer's are written
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], ptx::ld_shared_float(other + 8 * r));
      ptx::named_barrier_sync(barrier_id(ScaledBarrier::kLargest), 256);  // the other consumer has read this one's
    }
  }

  template <int kHalves, typename Between>
  __device__ __forceinline__ void store(const WarpgroupTile<Spec>& wg_tile, float (&accum)[kHalves * 64],
                                        int first_half, Between between) {
    if constexpr (kKeepsPreactivation) store_preactivation<kHalves>(wg_tile, accum, first_half);
    activate<kHalves>(accum);
    between();
    const int lane = ptx::lane_index();
    const int columns = params.gemm.n / 2;
    const int first_row = ptx::warp_index() % 4 * 16 + lane / 4;
    float largest[2];
    find_largest<kHalves>(largest, accum, first_row);
    unsigned char* smem = slabs.acquire();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 8 * r;
      const BlockScale scale(largest[r]);
      write_e4m3_row<4 * kHalves>(smem + row * 128, row, [&](int j) {
        const float* pair = accum + j / 8 * 64 + j % 8 * 4 + 2 * r;
        return ptx::pack_e4m3(pair[0] * scale.inverse, pair[1] * scale.inverse);
      });
      if (lane % 4 == 0 && row < wg_tile.rows && first_half == 0) {
        ptx::st_global_float(params.d_scale + static_cast<int64_t>(wg_tile.row + row) * (columns / kScaleBlock) +
                                 wg_tile.column / kScaleBlock,
                             scale.scale);
      }
    }
    // A TMA box has all 128 columns: a half is stored by the threads, as if the result ended after it.
    const int first = (wg_tile.column + 64 * first_half) / 2;
    const SlabTarget to{d_map, params.gemm.d, params.gemm.d_stride, kHalves == 2 ? columns / 2 : first + 32, 0};
    if constexpr (kHalves == 2) {
      slabs.store(to, wg_tile.row, wg_tile.rows, first);
    } else {
      sync_consumer(slabs.consumer);  // hazard: others read before all rows are written
      slabs.store_rows(slabs.smem.output(slabs.consumer, slabs.slab), to, wg_tile.row, wg_tile.rows, first);
      if (slabs.is_storing_thread) ptx::tma_store_commit();  // acquire counts the slabs
      slabs.slab = slabs.slab + 1 == Spec::kOutputSlabs ? 0 : slabs.slab + 1;
    }
  }

  __device__ __forceinline__ void finish() const { slabs.finish(); }
};

template <int kHalves>
struct Halves {
  static constexpr int kValue = kHalves;
};

// Takes the next tile before the finished one is stored, so that the next tile's scales are already being loaded.
template <typename Spec, typename Epilogue>
__device__ __forceinline__ void consume_scaled(const ScaledGemmParams& params, const SharedMemory<Spec>& smem,
                                               int consumer, Epilogue epilogue) {
  const int blocks = params.gemm.k / Spec::kBlockK;
  ScaledMainloop<Spec> mainloop(smem, consumer);
  RingPosition<Spec::kNumTileSlots> tile_state;
  Scales<Spec> scales;
  Tile next = next_tile<Spec>(smem, tile_state);
  // For `next`, if there is one.
  const auto find_scales = [&] {
    if (next.expert >= 0) scales.find(params, ScaledTile<Spec>(next, consumer).wg_tile);
  };
  const auto load_scales = [&] {
    const ScaledTile<Spec> tile(next, consumer);
    if (next.expert >= 0) scales.load_first(params, tile.wg_tile, blocks, tile.first_half);
  };
  find_scales();
  load_scales();
  while (next.expert >= 0) {
    const ScaledTile<Spec> tile(next, consumer);
    const auto finish = [&](auto halves, auto& accum) {
      next = next_tile<Spec>(smem, tile_state);
      find_scales();
      epilogue.template store<decltype(halves)::kValue>(tile.wg_tile, accum, tile.first_half, load_scales);
    };
    if (tile.is_halved) {
      float accum[Spec::kAccumulators / 2];
      mainloop.template multiply<1>(accum, scales, 0, consumer, blocks);
      finish(Halves<1>(), accum);
    } else {
      float accum[Spec::kAccumulators];
      mainloop.template multiply<2>(accum, scales, consumer, 0, blocks);
      finish(Halves<2>(), accum);
    }
  }
  epilogue.finish();
}

// See run_grouped_gemm. Epilogue: constructed from (params, smem, consumer, maps...).
template <typename Spec, typename Epilogue, typename... Maps>
__device__ __forceinline__ void run_scaled(const ScaledGemmParams& params, const ptx::TensorMap* a_map,
                                           const ptx::TensorMap& b_map, const Maps&... maps) {
  const SharedMemory<Spec> smem{ptx::dynamic_shared_memory()};
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;

  if (warp == 0 && ptx::elect_one()) {
    if constexpr (!Spec::kGathersA) ptx::prefetch_tensor_map(a_map);
    ptx::prefetch_tensor_map(&b_map);
    (ptx::prefetch_tensor_map(&maps), ...);
    init_barriers(smem);
  }
  ptx::barrier_sync_block();
  const bool overlaps_previous_grid = !Spec::kGathersA && params.overlaps_previous_grid != 0;
  if (!overlaps_previous_grid) {
    ptx::grid_dependency_wait();
    ptx::grid_launch_dependents();
  }

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    produce<Spec, Weights::kNk, /*kIsScaled=*/true>(params.gemm, smem, warp, a_map, b_map, overlaps_previous_grid);
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    if (overlaps_previous_grid) ptx::grid_dependency_wait();
    const int consumer = warpgroup - 1;
    consume_scaled<Spec>(params, smem, consumer, Epilogue(params, smem, consumer, maps...));
  }
}

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_scaled(const ScaledGemmParams& params, const ptx::TensorMap& a_map,
                                                    const ptx::TensorMap& b_map, const ptx::TensorMap& d_map) {
  run_scaled<Spec, ScaledEpilogue<Spec>>(params, &a_map, b_map, d_map);
}

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_gated_scaled(const ScaledGemmParams& params, const ptx::TensorMap& b_map,
                                                          const ptx::TensorMap& d_map) {
  run_scaled<Spec, ScaledGatedEpilogue<Spec>>(params, nullptr, b_map, d_map);
}

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_gated_scaled_kept(const ScaledGemmParams& params,
                                                               const ptx::TensorMap& b_map, const ptx::TensorMap& d_map,
                                                               const ptx::TensorMap& z_map) {
  run_scaled<Spec, ScaledGatedEpilogue<Spec, ptx::TensorMap>>(params, nullptr, b_map, d_map, z_map);
}

}  // namespace flashmoe::moe::sm90
