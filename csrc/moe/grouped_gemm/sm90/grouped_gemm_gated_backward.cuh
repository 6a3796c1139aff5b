// s = a[row] B_e for sm_90a, and what follows from it: with z = (g, u) read from the preactivation, w the row's weight,
//   d[row] = w s times the activation's derivatives by g and u, in the columns of z;
//   weighted_activation[row] = w activation(z);
//   row_dots[128 columns][row] = sum over these columns of activation(z) s.
//
// For each sum the epilogue reads two elements of memory and writes three. So with tiles of 128 columns the two
// consumer warpgroups take alternate tiles of the block: while one runs its epilogue, the other's products run. Tiles
// of 256 columns, which read less per product, are shared by both consumers, 64 rows each, and z is loaded while the
// products run.
//   grid, counter   as grouped_gemm.cuh
// Loads, schedule and tiles are those of grouped_gemm.cuh. Rows of the next expert, or past the last, are multiplied
// too but not stored.
#pragma once

#include "device/convert.cuh"
#include "device/reduce.cuh"
#include "moe/grouped_gemm/activation.cuh"
#include "moe/grouped_gemm/sm90/mainloop.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/stmatrix.cuh"

namespace flashmoe::moe::sm90 {

// kOutputSlabs: buffers of 64 rows and 64 columns per consumer. 3: gate, up and activation; the gradient replaces z in
// place. 5: two more for z, so that the next columns of z are loaded while these are computed.
template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kOutputSlabs>
struct GatedBackwardSpec : TileSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs, false, false> {
  using Base = TileSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs, false, false>;
  static constexpr bool kFetchesAhead = kOutputSlabs == 5;
  static constexpr bool kIsPingpong = kBlockN == 128;     // the consumers take alternate tiles, not half of each
  static constexpr int kRowBlocks = kIsPingpong ? 2 : 1;  // of 64 rows, per consumer and tile
  static constexpr int kColumnSlabs = kBlockN / 64;       // per tile
  static constexpr int kAccumulators = kBlockN / 2;       // per thread, for each 64 rows
  static constexpr int kSharedBytes = Base::kSharedBytes + 2 * 8;
  static_assert(kBlockM == 128 && (kBlockN == 128 || kBlockN == 256), "a consumer has 128 accumulators per thread");
  static_assert(kOutputSlabs == 3 || kOutputSlabs == 5, "gate, up, activation, and z where it is fetched ahead");
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// Completes when the other consumer has waited for every stage of its tile: the stages that follow belong to this
// consumer. A wait names only the parity of a phase, so no warp may wait for a stage before the earlier stages have
// been waited for.
template <typename Spec>
__device__ __forceinline__ ptx::Mbarrier* order_barrier(const SharedMemory<Spec>& smem, int consumer) {
  return smem.barrier(Spec::kNumBarriers + consumer);
}

template <typename Spec>
__device__ __forceinline__ void init_pingpong_barriers(const SharedMemory<Spec>& smem) {
  constexpr int kConsumerWarps = 4;  // of the consumer whose tile it is
#pragma unroll
  for (int stage = 0; stage < Spec::kNumStages; ++stage) {
    ptx::mbarrier_init(smem.full(stage), 1);
    ptx::mbarrier_init(smem.empty(stage), kConsumerWarps);
  }
#pragma unroll
  for (int slot = 0; slot < Spec::kNumTileSlots; ++slot) {
    ptx::mbarrier_init(smem.tile_full(slot), 1);
    // Both consumers read every tile.
    ptx::mbarrier_init(smem.tile_empty(slot), Spec::kNumConsumers * kConsumerWarps);
  }
  ptx::mbarrier_init(order_barrier(smem, 0), kConsumerWarps);
  ptx::mbarrier_init(order_barrier(smem, 1), kConsumerWarps);
  ptx::mbarrier_init_fence();
}

// One warpgroup's products of a tile of 128 rows.
template <typename Spec, Weights kWeights>
struct TileProducts {
  const SharedMemory<Spec> smem;
  const int consumer;
  RingPosition<Spec::kNumStages> state;
  int order_parity;

  __device__ __forceinline__ TileProducts(const SharedMemory<Spec>& smem_, int consumer_)
      : smem(smem_), consumer(consumer_), order_parity(consumer_ == 0 ? 1 : 0) {}

  // Skips the stages of the other consumer's tile.
  __device__ __forceinline__ void skip(int blocks) {
    const int passed = state.stage + blocks;
    state.parity ^= passed / Spec::kNumStages % 2;
    state.stage = passed % Spec::kNumStages;
  }

  __device__ __forceinline__ void issue(float (&accum)[Spec::kRowBlocks][Spec::kAccumulators], bool is_first) const {
    ptx::mbarrier_wait(smem.full(state.stage), state.parity);
    issue_stage<Spec, kWeights, 64, Spec::kRowBlocks>(accum, smem, state.stage, 0, is_first);
  }

  // One arrival per warp: its wgmma_wait ensures that its share of the product has read the stage.
  __device__ __forceinline__ void arrive(ptx::Mbarrier* barrier) const {
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void multiply(float (&accum)[Spec::kRowBlocks][Spec::kAccumulators], int blocks) {
    ptx::mbarrier_wait(order_barrier(smem, consumer), order_parity);
    order_parity ^= 1;
    issue(accum, true);
    int before = state.stage;
    state.advance();
    for (int block = 1; block < blocks; ++block) {
      issue(accum, false);
      ptx::wgmma_wait<1>();
      arrive(smem.empty(before));
      before = state.stage;
      state.advance();
    }
    ptx::warp_sync();  // no lane of the warp still waits for a stage
    arrive(order_barrier(smem, 1 - consumer));
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < Spec::kRowBlocks; ++block) ptx::wgmma_fence_operands(accum[block]);
    arrive(smem.empty(before));
  }
};

// A warp's epilogue, subtile by subtile: its 16 rows of a 64-row block by 64 columns. Global memory is read and written
// 128 bytes of a row at a time, by eight lanes; the warp's own shared memory converts this to the layout of the sums.
// Buffers: [16 rows][64 columns], swizzled.
template <typename Spec>
struct BackwardEpilogue {
  using Element = typename Spec::Element;
  static constexpr int kSubtiles = Spec::kRowBlocks * Spec::kColumnSlabs;
  static constexpr int kSums = 16;  // per thread, for half a subtile: 32 columns
  static constexpr int kDotSlabs = kDotColumns / 64;

  const GemmParams& params;
  unsigned char* const warp_smem;  // this warp's part of the consumer's first buffer
  const int matrix_offset;         // in a buffer: this lane's row of 16 columns, for ldmatrix and stmatrix
  const int row_in_tile;           // the warp's first row
  Tile tile;

  __device__ __forceinline__ BackwardEpilogue(const GemmParams& params_, const SharedMemory<Spec>& smem, int consumer)
      : params(params_),
        warp_smem(smem.output(consumer, 0) + ptx::warp_index() % 4 * (16 * 128)),
        matrix_offset(swizzled(lane() % 16, lane() / 16)),
        row_in_tile((Spec::kIsPingpong ? 0 : consumer * 64) + ptx::warp_index() % 4 * 16) {}

  __device__ __forceinline__ unsigned char* buffer(int index) const { return warp_smem + index * Spec::kSlabBytes; }
  // The buffers of z: gate then up or, interleaved, the first and the second 64 of the subtile's 128 columns.
  static constexpr int kFirstZ = Spec::kFetchesAhead ? 3 : 0;
  __device__ __forceinline__ unsigned char* z(int half) const { return buffer(kFirstZ + half); }

  __device__ __forceinline__ int row(int subtile) const {
    return tile.first_row + subtile / Spec::kColumnSlabs * 64 + row_in_tile;
  }
  // The first of the lane's two rows, which are 8 apart.
  __device__ __forceinline__ int lane_row(int subtile) const { return row(subtile) + static_cast<int>(lane() / 4); }
  __device__ __forceinline__ int column(int subtile) const {
    return tile.n_block * Spec::kBlockN + subtile % Spec::kColumnSlabs * 64;
  }
  __device__ __forceinline__ bool exists(int subtile) const {
    return subtile < kSubtiles && row(subtile) < tile.end_row && column(subtile) < params.n;
  }
  // The column of z at which half `half` of a subtile's columns begins.
  __device__ __forceinline__ int z_column(int subtile, int half) const {
    return params.is_interleaved != 0 ? 2 * column(subtile) + half * 64 : half * params.n + column(subtile);
  }
  // How many of a half's 64 columns exist; may be more than 64.
  __device__ __forceinline__ int z_columns(int subtile, int half) const {
    return params.is_interleaved != 0 ? 2 * params.n - z_column(subtile, half) : params.n - column(subtile);
  }

  // Recomputed where it is used: values derived from it would occupy registers.
  static __device__ __forceinline__ uint32_t lane() { return ptx::recompute(static_cast<uint32_t>(ptx::lane_index())); }
  static __device__ __forceinline__ int swizzled(uint32_t smem_row, uint32_t chunk) {
    return static_cast<int>(smem_row * 128 + (chunk ^ smem_row % 8) * 16);
  }

  // A lane's copies of 16 rows by 64 columns: 16 bytes of rows `row`, + 4, + 8 and + 12, eight lanes per row.
  struct Copies {
    int row, column;
    int offset;  // in a buffer

    __device__ __forceinline__ explicit Copies(uint32_t lane)
        : row(lane / 8), column(lane % 8 * 8), offset(swizzled(lane / 8, lane % 8)) {}
    // Every 4 rows, bit 2 of the swizzled chunk changes.
    __device__ __forceinline__ int offset_of(int i) const { return (offset ^ i % 2 * 64) + i * 512; }
  };

  // Starts the copies of a subtile's z. Rows past the expert's last and columns past the last become zeros.
  __device__ __forceinline__ void fetch(int subtile) const {
    const Copies copies(lane());
    const int rows = tile.end_row - row(subtile) - copies.row;
    const int64_t stride = 2 * params.n;
    const Element* row_gmem =
        static_cast<const Element*>(params.preactivation) + (row(subtile) + copies.row) * stride + copies.column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool has_columns = copies.column < z_columns(subtile, half);
      const Element* from = row_gmem + z_column(subtile, half);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::cp_async_16(z(half) + copies.offset_of(i), from + i * 4 * stride, has_columns && i * 4 < rows ? 16 : 0);
      }
    }
    ptx::cp_async_commit();
  }

  // Stores 64 columns of a subtile, or those that exist.
  __device__ __forceinline__ void store(int index, void* to, int64_t stride, int first_row, int first_column,
                                        int columns) const {
    const Copies copies(lane());
    const int rows = tile.end_row - first_row - copies.row;
    Element* gmem = static_cast<Element*>(to) + (first_row + copies.row) * stride + (first_column + copies.column);
#pragma unroll
    for (int first = 0; first < 4; first += 2) {
      uint32_t words[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::ld_shared_128(words[i], buffer(index) + copies.offset_of(first + i));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int copy_row = (first + i) * 4;
        if (copy_row < rows && copies.column < columns) ptx::st_global_128(gmem + copy_row * stride, words[i]);
      }
    }
  }

  // This lane's row of 16 columns for stmatrix or ldmatrix: step 0 to 3 of a buffer's 64 columns.
  __device__ __forceinline__ unsigned char* matrix(int index, int step) const {
    return buffer(index) + (matrix_offset ^ step * 32);
  }
  // Offset of a thread's interleaved gate and up for two neighbouring columns: pair i of a step, in the order of the
  // sums.
  static __device__ __forceinline__ int interleaved_offset(int step, int i) {
    const int block = 2 * step + i / 2;  // of 8 columns, 16 of z
    return block / 4 * Spec::kSlabBytes + swizzled(lane() / 4 + 8 * (i % 2), block % 4 * 2 + lane() % 4 / 2) +
           static_cast<int>(lane() % 2 * 8);
  }

  // Loads 16 columns of z as pairs within a row: rows g and g + 8 of the first eight columns, then of the others.
  __device__ __forceinline__ void load_z(uint32_t (&gate)[4], uint32_t (&up)[4], int step) const {
    if (params.is_interleaved == 0) {
      ptx::ldmatrix_x4(gate, matrix(kFirstZ, step));
      ptx::ldmatrix_x4(up, matrix(kFirstZ + 1, step));
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[2];
      ptx::ld_shared_64(words, z(0) + interleaved_offset(step, i));
      gate[i] = (words[0] & 0xffffu) | words[1] << 16;
      up[i] = words[0] >> 16 | (words[1] & 0xffff0000u);
    }
  }
  __device__ __forceinline__ void store_gradient(const uint32_t (&gate)[4], const uint32_t (&up)[4], int step) const {
    if (params.is_interleaved == 0) {
      ptx::stmatrix_x4(matrix(0, step), gate);
      ptx::stmatrix_x4(matrix(1, step), up);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t words[2] = {(gate[i] & 0xffffu) | up[i] << 16, gate[i] >> 16 | (up[i] & 0xffff0000u)};
      ptx::st_shared_64(buffer(0) + interleaved_offset(step, i), words);
    }
  }

  // Replaces 32 columns of z in shared memory by its gradient and writes the activation. Adds to `dots` in the order of
  // the columns.
  template <typename Function>
  __device__ __forceinline__ void compute(Function, const float (&accum)[kSums], const float (&weights)[2],
                                          float (&dots)[2], int first_step, int columns) const {
#pragma unroll
    for (int i_step = 0; i_step < 2; ++i_step) {
      const int step = first_step + i_step;
      uint32_t gate[4], up[4], active[4];
      load_z(gate, up, step);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = weights[i % 2];
        const float2 g = unpack<Element>(gate[i]);
        const float2 u = unpack<Element>(up[i]);
        const float first = accum[8 * i_step + 2 * i], second = accum[8 * i_step + 2 * i + 1];
        const ActivationGradient one = Function::backward(g.x, u.x), other = Function::backward(g.y, u.y);
        gate[i] = pack<Element>(weight * first * one.by_gate, weight * second * other.by_gate);
        up[i] = pack<Element>(weight * first * one.by_up, weight * second * other.by_up);
        active[i] = pack<Element>(weight * one.value, weight * other.value);
        // Past the last column s is 0 or, in an infinite row, NaN.
        if (step * 16 + i / 2 * 8 < columns) {
          dots[i % 2] = ptx::fma_rn(one.value, first, dots[i % 2]);
          dots[i % 2] = ptx::fma_rn(other.value, second, dots[i % 2]);
        }
      }
      // Hazard: another lane may still read the z that is replaced in place.
      ptx::warp_sync();
      store_gradient(gate, up, step);
      ptx::stmatrix_x4(matrix(2, step), active);
    }
  }

  // Copies the accumulators of half-subtile `half`, which is known only at run time, so that there is one copy of the
  // code that follows.
  static __device__ __forceinline__ void copy_half(float (&of_half)[kSums],
                                                   const float (&accum)[Spec::kRowBlocks][Spec::kAccumulators],
                                                   int half) {
    constexpr int kHalves = 2 * Spec::kColumnSlabs;  // of 64 rows
#pragma unroll
    for (int other = 0; other < 2 * kSubtiles; ++other) {
      if (half != other) continue;
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        of_half[i] =
            ptx::bits_float(ptx::recompute(ptx::float_bits(accum[other / kHalves][other % kHalves * kSums + i])));
    }
  }

  __device__ __forceinline__ void start(const Tile& tile_) {
    tile = tile_;
    if (exists(0)) fetch(0);
  }

  __device__ __forceinline__ void finish_subtile(int subtile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store(half, params.d, params.d_stride, row(subtile), z_column(subtile, half), z_columns(subtile, half));
    }
    store(2, params.weighted_activation, params.n, row(subtile), column(subtile), params.n - column(subtile));
  }

  // The next subtile that has rows and columns, or kSubtiles.
  __device__ __forceinline__ int next(int subtile) const {
    do {
      ++subtile;
    } while (subtile < kSubtiles && !exists(subtile));
    return subtile;
  }

  __device__ __forceinline__ void run(const float (&accum)[Spec::kRowBlocks][Spec::kAccumulators]) const {
    float dots[2] = {0.0f, 0.0f};
    float weights[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int subtile = exists(0) ? 0 : kSubtiles; subtile < kSubtiles;) {
      if (subtile % Spec::kColumnSlabs == 0) {
        const int first = lane_row(subtile);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const bool is_inside = first + 8 * r < tile.end_row;
          weights[r] = is_inside ? ptx::ld_global_float(params.row_weights + first + 8 * r) : 0.0f;
        }
      }
      if (subtile % kDotSlabs == 0) dots[0] = dots[1] = 0.0f;
      ptx::cp_async_wait<0>();
      ptx::warp_sync();  // z has arrived, for all lanes
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        float of_half[kSums];
        copy_half(of_half, accum, 2 * subtile + half);
        with_activation(params.activation, [&](auto function) {
          compute(function, of_half, weights, dots, 2 * half, params.n - column(subtile));
        });
      }
      ptx::warp_sync();  // z has been read; what replaces it or is stored beside it is written
      const int following = next(subtile);
      if (Spec::kFetchesAhead && following < kSubtiles) fetch(following);
      finish_subtile(subtile);
      if constexpr (!Spec::kFetchesAhead) {
        // Hazard: the next z overwrites what another lane still stores. (With kFetchesAhead, only what is computed from
        // the next z would, and the wait for that z comes first.)
        ptx::warp_sync();
        if (following < kSubtiles) fetch(following);
      }
      if (following == kSubtiles || following % kDotSlabs == 0) store_dots(dots, subtile);
      subtile = following;
    }
  }

  __device__ __forceinline__ void store_dots(const float (&dots)[2], int subtile) const {
    const int64_t dot_tile = column(subtile) / kDotColumns;
    const int first = lane_row(subtile);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float dot = quad_sum(dots[r]);
      const int dot_row = first + 8 * r;
      if (ptx::lane_index() % 4 == 0 && dot_row < tile.end_row) {
        ptx::st_global_float(params.row_dots + dot_tile * params.slots + dot_row, dot);
      }
    }
  }
};

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void consume_pingpong(const GemmParams& params, const SharedMemory<Spec>& smem,
                                                 int consumer) {
  const int blocks = ceil_div(params.k, Spec::kBlockK);
  TileProducts<Spec, kWeights> products(smem, consumer);
  BackwardEpilogue<Spec> epilogue(params, smem, consumer);
  RingPosition<Spec::kNumTileSlots> tile_state;
  bool is_mine = consumer == 0;
  for (;; is_mine = !is_mine) {
    const Tile tile = next_tile<Spec>(smem, tile_state);
    if (tile.expert < 0) break;
    if (!is_mine) {
      products.skip(blocks);
      continue;
    }
    float accum[Spec::kRowBlocks][Spec::kAccumulators];
    epilogue.start(tile);
    products.multiply(accum, blocks);
    epilogue.run(accum);
  }
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void consume_cooperative(const GemmParams& params, const SharedMemory<Spec>& smem,
                                                    int consumer) {
  const int blocks = ceil_div(params.k, Spec::kBlockK);
  Mainloop<Spec, kWeights> mainloop(smem, consumer);
  BackwardEpilogue<Spec> epilogue(params, smem, consumer);
  RingPosition<Spec::kNumTileSlots> tile_state;
  while (true) {
    const Tile tile = next_tile<Spec>(smem, tile_state);
    if (tile.expert < 0) break;
    if (tile.first_row + consumer * 64 >= tile.end_row) {
      mainloop.skip(blocks);
      continue;
    }
    float accum[Spec::kRowBlocks][Spec::kAccumulators];
    epilogue.start(tile);
    mainloop.template multiply<1>(accum, blocks);
    epilogue.run(accum);
  }
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void grouped_gemm_gated_backward(const GemmParams& params, const ptx::TensorMap& a_map,
                                                            const ptx::TensorMap& b_nk_map,
                                                            const ptx::TensorMap& b_kn_map) {
  const SharedMemory<Spec> smem{ptx::dynamic_shared_memory()};
  const ptx::TensorMap& b_map = kWeights == Weights::kNk ? b_nk_map : b_kn_map;
  // The shuffle tells the compiler that the role is the same in the whole warp.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;

  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&a_map);
    ptx::prefetch_tensor_map(&b_map);
    if constexpr (Spec::kIsPingpong) {
      init_pingpong_barriers(smem);
    } else {
      init_barriers(smem);
    }
  }
  ptx::barrier_sync_block();
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    produce<Spec, kWeights>(params, smem, warp, &a_map, b_map);
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    if constexpr (Spec::kIsPingpong) {
      consume_pingpong<Spec, kWeights>(params, smem, warpgroup - 1);
    } else {
      consume_cooperative<Spec, kWeights>(params, smem, warpgroup - 1);
    }
  }
}

}  // namespace flashmoe::moe::sm90
