// Loads a block's keys, by cp.async or, from an FP8 cache, through registers; and a warp's share of Q into registers.
#pragma once

#include "device/swizzle.cuh"
#include "mla/dequantize.cuh"
#include "mla/topk_indices.cuh"
#include "mla/params/fp8.h"
#include "mla/tile_scheduler.cuh"
#include "mla/sm80/spec.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm80 {

// get_page for a page's index, which the caller has computed: one division per key.
__device__ __forceinline__ int page_of(const DecodeParams& params, int batch, int index) {
  if (params.block_table == nullptr) return batch;
  const int32_t* page_gmem = params.block_table + batch * params.block_table_stride + index;
  return max(0, min(params.num_pages - 1, static_cast<int>(ptx::ld_global_32(page_gmem))));
}

// The index of this lane's key in a block; -1 if there is none.
__device__ __forceinline__ int lane_topk_index(const DecodeParams& params, const WorkTile& work, int block) {
  return topk_index(params, work, block * 32 + ptx::lane_index());
}

// This thread's keys of a block, one per pass; eight threads share a key.
template <typename Spec>
struct BlockKeys {
  const DecodeParams& params;
  const WorkTile& work;
  // Their offsets, in elements, in an FP8 cache in bytes; negative: zeros instead of a key.
  int64_t offset[Spec::kPasses];
  int slot[Spec::kPasses];  // sparse: used instead of offset; rows among all pages

  __device__ __forceinline__ BlockKeys(const DecodeParams& params_, const WorkTile& segment_)
      : params(params_), work(segment_) {}

  // Where this thread stores 16 bytes of each 64 columns of its first key.
  __device__ __forceinline__ static ptx::SmemPointer thread_smem(ptx::SmemPointer stage_smem) {
    const int thread = ptx::thread_index();
    return stage_smem + swizzled_offset<kHeadDim>(thread / kSegmentChunks, thread % kSegmentChunks);
  }

  // Looks up the pages of a block's keys, some time before they are loaded.
  __device__ __forceinline__ void locate(int block) {
    if constexpr (Spec::kIsSparse) {
      load_topk_indices(block);
    } else {
      load_pages(block);
    }
  }

  __device__ __forceinline__ void load_pages(int block) {
#pragma unroll
    for (int pass = 0; pass < Spec::kPasses; ++pass) {
      const int key = block * Spec::kBlockN + pass * Spec::kRowsPerPass + ptx::thread_index() / kSegmentChunks;
      offset[pass] = -1;
      if (key >= work.keys) continue;
      const int index = static_cast<int>(static_cast<uint32_t>(key) / static_cast<uint32_t>(params.page_size));
      offset[pass] = page_of(params, work.batch, index) * params.page_stride +
                     (key - index * params.page_size) * params.key_stride;
    }
  }

  __device__ __forceinline__ void load_topk_indices(int block) {
    const int of_lane = lane_topk_index(params, work, block);
#pragma unroll
    for (int pass = 0; pass < Spec::kPasses; ++pass) {
      slot[pass] = ptx::shuffle_index(of_lane, pass * Spec::kRowsPerPass + ptx::thread_index() / kSegmentChunks);
    }
  }

  // Sparse: the offset is computed only here, because it takes more registers than the index.
  __device__ __forceinline__ int64_t offset_of(int pass) const {
    if constexpr (!Spec::kIsSparse) {
      return offset[pass];
    } else {
      return row_offset(params, slot[pass]);
    }
  }
};

// Loads the key blocks of a work tile in order: locate() finds the keys, issue() reads them, wait() and store_smem()
// make sure that they are in shared memory.
template <typename Spec>
struct KeyLoader : BlockKeys<Spec> {
  using Element = typename Spec::Element;
  using BlockKeys<Spec>::BlockKeys;
  using BlockKeys<Spec>::params;

  // Keys past the end of the sequence become zeros, whatever the cache holds there: 0 * NaN is NaN.
  __device__ __forceinline__ void issue(ptx::SmemPointer stage_smem) const {
    const int thread = ptx::thread_index();
    const ptx::SmemPointer thread_smem = this->thread_smem(stage_smem);
#pragma unroll
    for (int pass = 0; pass < Spec::kPasses; ++pass) {
      const int64_t key_offset = this->offset_of(pass);
      const bool exists = key_offset >= 0;
      const Element* key_gmem = static_cast<const Element*>(params.cache) + (exists ? key_offset : 0) +
                                thread % kSegmentChunks * kChunkElements;
#pragma unroll
      for (int slab = 0; slab < kHeadDim / 64; ++slab) {
        ptx::cp_async_16(
            thread_smem + (pass * Spec::kRowsPerPass * Spec::kRowBytes + slab * (kSegmentChunks * kChunkBytes)),
            key_gmem + slab * 64, exists ? kChunkBytes : 0);
      }
    }
  }

  __device__ __forceinline__ void commit() const { ptx::cp_async_commit(); }
  __device__ __forceinline__ void wait() const { ptx::cp_async_wait<Spec::kNumStages - 2>(); }
  __device__ __forceinline__ void wait_all() const { ptx::cp_async_wait<0>(); }
  __device__ __forceinline__ void store_smem(ptx::SmemPointer) const {}
};

// The same for an FP8 cache.
template <typename Spec>
struct Fp8Loader : BlockKeys<Spec> {
  using Element = typename Spec::Element;
  using BlockKeys<Spec>::BlockKeys;
  using BlockKeys<Spec>::params;
  static constexpr int kSlabs = kLatentDim / 64;
  static constexpr int kSlabsPerScale = kScaleColumns / 64;

  uint32_t fp8[Spec::kPasses][kSlabs][2];
  uint32_t scales[Spec::kPasses][kSlabs / kSlabsPerScale];
  uint32_t rotary[Spec::kPasses][4];

  __device__ __forceinline__ void issue(ptx::SmemPointer) {
    const int chunk = ptx::thread_index() % kSegmentChunks;
#pragma unroll
    for (int pass = 0; pass < Spec::kPasses; ++pass) {
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) fp8[pass][slab][0] = fp8[pass][slab][1] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) scales[pass][i] = rotary[pass][i] = 0;
      const int64_t key_offset = this->offset_of(pass);
      if (key_offset < 0) continue;
      const unsigned char* key_gmem = static_cast<const unsigned char*>(params.cache) + key_offset;
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) ptx::ld_global_64(fp8[pass][slab], key_gmem + slab * 64 + chunk * 8);
      ptx::ld_global_128(scales[pass], key_gmem + kScaleBytesOffset);
      ptx::ld_global_128(rotary[pass], key_gmem + kRotaryBytesOffset + chunk * kChunkBytes);
    }
  }

  __device__ __forceinline__ void commit() const {}
  __device__ __forceinline__ void wait() const {}
  __device__ __forceinline__ void wait_all() const {}

  __device__ __forceinline__ void store_smem(ptx::SmemPointer stage_smem) const {
    const ptx::SmemPointer thread_smem = this->thread_smem(stage_smem);
#pragma unroll
    for (int pass = 0; pass < Spec::kPasses; ++pass) {
      const ptx::SmemPointer key_smem = thread_smem + pass * Spec::kRowsPerPass * Spec::kRowBytes;
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        const float scale = ptx::bits_float(scales[pass][slab / kSlabsPerScale]);
        uint32_t words[4];
        dequantize<Element>(words, fp8[pass][slab][0], fp8[pass][slab][1], scale);
        ptx::st_shared_128(key_smem + slab * (kSegmentChunks * kChunkBytes), words);
      }
      ptx::st_shared_128(key_smem + kSlabs * (kSegmentChunks * kChunkBytes), rotary[pass]);
    }
  }
};

template <typename Spec, bool kIsFp8 = Spec::kIsFp8>
struct LoaderOf {
  using Type = KeyLoader<Spec>;
};
template <typename Spec>
struct LoaderOf<Spec, true> {
  using Type = Fp8Loader<Spec>;
};

// A warp's columns of its rows of Q, as A operands: step j has the 16 columns from 64 j + 16 * column_warp on. Rows
// past the last one repeat it; their results are not stored.
template <typename Spec>
__device__ __forceinline__ void load_query(uint32_t (&Q_rmem)[Spec::kMmaM][Spec::kSteps][4], const DecodeParams& params,
                                           int batch, int first_row, int column_warp) {
  const int rows = params.tokens * params.heads;
  const int lane = ptx::lane_index();
  const auto* Q_gmem = static_cast<const typename Spec::Element*>(params.q) + batch * params.q_stride_batch +
                       column_warp * 16 + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* row_gmem = Q_gmem + min(rows - 1, first_row + m * 16 + half * 8 + lane / 4) * params.q_stride_row;
#pragma unroll
      for (int step = 0; step < Spec::kSteps; ++step) {
        Q_rmem[m][step][half] = ptx::ld_global_32(row_gmem + step * 64);
        Q_rmem[m][step][2 + half] = ptx::ld_global_32(row_gmem + step * 64 + 8);
      }
    }
}

}  // namespace flashmoe::mla::sm80
