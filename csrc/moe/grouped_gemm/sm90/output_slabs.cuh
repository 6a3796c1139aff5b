// Results are stored through shared memory, [64 rows][64 columns] at a time, whole slabs by TMA.
#pragma once

#include "device/convert.cuh"
#include "device/named_barriers.cuh"
#include "moe/grouped_gemm/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"

namespace flashmoe::moe::sm90 {

// The destination of a slab: (column, row, half) of the map, or element by element at `gmem`.
struct SlabTarget {
  const ptx::TensorMap& map;
  void* gmem;      // the tensor, or one half of it
  int64_t stride;  // elements from one row to the next
  int columns;     // of the tensor, or of one half
  int half;
};

// The output buffers of a consumer warpgroup, used cyclically: acquire, write, store.
template <typename Spec>
struct OutputSlabs {
  const SharedMemory<Spec>& smem;
  const int consumer;
  const bool is_storing_thread;
  int slab = 0;

  __device__ __forceinline__ OutputSlabs(const SharedMemory<Spec>& smem_, int consumer_)
      : smem(smem_), consumer(consumer_), is_storing_thread(ptx::thread_index() % 128 == 0) {}

  __device__ __forceinline__ unsigned char* acquire() const {
    // Hazard: the last store from this buffer may still read it; the thread that issued the store waits for it.
    if (is_storing_thread) ptx::tma_store_wait_read<Spec::kOutputSlabs - 1>();
    sync_consumer(consumer);
    return smem.output(consumer, slab);
  }

  // Stores `rows` of the 64 rows. is_whole: all 64 columns, or those up to the tensor's last.
  __device__ __forceinline__ void store(const SlabTarget& to, int row, int rows, int column, bool is_whole = true) {
    const unsigned char* slab_smem = smem.output(consumer, slab);
    // Hazard: no reader may begin before all 64 rows are written and visible.
    ptx::fence_proxy_async_shared();
    sync_consumer(consumer);
    if (rows >= 64 && is_whole) {
      if (is_storing_thread) ptx::tma_store_4d(&to.map, slab_smem, column, row, to.half, 0);
    } else {
      store_rows(slab_smem, to, row, rows, column);
    }
    // One group per slab, even if it contains no store: acquire counts groups.
    if (is_storing_thread) ptx::tma_store_commit();
    slab = slab + 1 == Spec::kOutputSlabs ? 0 : slab + 1;
  }

  // Stores the first `rows` rows, 16 bytes at a time: the rows after them belong to another expert.
  __device__ __forceinline__ void store_rows(const unsigned char* slab_smem, const SlabTarget& to, int row, int rows,
                                             int column) const {
    const int thread = ptx::thread_index() % 128;
    const int chunk = thread % 8;
    if (column + chunk * 8 >= to.columns) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slab_row = i * 16 + thread / 8;
      if (slab_row >= rows) break;
      uint32_t words[4];
      ptx::ld_shared_128(words, slab_smem + slab_row * 128 + (chunk ^ slab_row % 8) * 16);
      ptx::st_global_128(
          static_cast<typename Spec::Element*>(to.gmem) + (row + slab_row) * to.stride + column + chunk * 8, words);
    }
  }

  __device__ __forceinline__ void finish() const {
    // Hazard: the last store may still read the buffer; the block's shared memory is gone when the block ends.
    if (is_storing_thread) ptx::tma_store_wait_read<0>();
  }
};

// Writes 64 or fewer columns of sums as 16-bit elements to a slab with 128-byte swizzle: 16-byte chunk c of row r is
// stored at c ^ (r % 8). One stmatrix stores the warp's 16 rows by 16 columns.
template <typename Element, int kNumAccum = 32>
__device__ __forceinline__ void write_slab(unsigned char* smem, const float* accum) {
  const int lane = ptx::lane_index();
  const int row = ptx::warp_index() % 4 * 16 + lane % 16;
  unsigned char* row_smem = smem + row * 128;
#pragma unroll
  for (int step = 0; step < kNumAccum / 8; ++step) {
    const float* d = accum + 8 * step;
    const uint32_t words[4] = {pack<Element>(d[0], d[1]), pack<Element>(d[2], d[3]), pack<Element>(d[4], d[5]),
                               pack<Element>(d[6], d[7])};
    const int chunk = step * 2 + lane / 16;
    ptx::stmatrix_x4(row_smem + (chunk ^ (row % 8)) * 16, words);
  }
}

}  // namespace flashmoe::moe::sm90
