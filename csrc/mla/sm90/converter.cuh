// Four warps convert the 8-bit floats of a key block to elements, in the stage where TMA has put them.
//
// A group of 256 columns has four slabs; its FP8 values are in the last two, 128 columns in each. The slabs are
// converted in order, from the first on. A warp has 16 keys, two lanes per key: what a lane overwrites is read only by
// its own warp.
#pragma once

#include "mla/dequantize.cuh"
#include "mla/topk_indices.cuh"
#include "mla/params/fp8.h"
#include "mla/tile_scheduler.cuh"
#include "mla/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm90 {

template <typename Spec>
struct Converter {
  using Element = typename Spec::Element;
  static constexpr int kChunks = 4;  // 16 bytes each: half of a slab's row

  const DecodeParams& params;
  const SharedMemory<Spec> shared;
  const int key;   // of the block
  const int half;  // of a slab's row
  StageUses uses;

  __device__ __forceinline__ Converter(const DecodeParams& params_, const SharedMemory<Spec>& shared_)
      : params(params_),
        shared(shared_),
        key(ptx::warp_index() % 4 * 16 + ptx::lane_index() % 16),
        half(ptx::lane_index() / 16) {}

  // Where a block's key is: its page, or with indices its row among all pages; -1 if there is no key.
  __device__ __forceinline__ int get_page(const WorkTile& work, int block) const {
    const int sequence_key = block * Spec::kBlockN + key;
    if constexpr (Spec::kIsSparse) return block < work.end_block ? topk_index(params, work, sequence_key) : -1;
    if (sequence_key >= work.keys || block >= work.end_block) return -1;
    return mla::get_page(params, work.batch, sequence_key);
  }

  // The key's four scales; zero if there is no key.
  __device__ __forceinline__ void load_scales(uint32_t (&scales)[4], int block, int page) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i] = 0;
    if (page < 0) return;
    const auto* scales_gmem = static_cast<const unsigned char*>(params.cache) + kScaleBytesOffset;
    if constexpr (Spec::kIsSparse) {
      ptx::ld_global_128(scales, scales_gmem + row_offset(params, page));
      return;
    }
    // Without a block table each sequence is one page.
    const auto row = row_in_page(params, block * Spec::kBlockN + key);
    ptx::ld_global_128(scales, scales_gmem + page * params.page_stride + row * params.key_stride);
  }

  // Waits for the FP8 values and, if they are gathered, for the slabs that they are converted into: the arrival of a
  // cp.async does not imply it.
  __device__ __forceinline__ void wait_raw(int stage, int group, int parity) const {
    if constexpr (Spec::kIsSparse) ptx::mbarrier_wait(shared.key_empty(stage, group), parity ^ 1);
    ptx::mbarrier_wait(shared.raw_full(stage, group), parity);
  }

  // Makes what this warp has written visible to the products.
  __device__ __forceinline__ void announce(int stage, int group) const {
    ptx::fence_proxy_async_shared();
    ptx::warp_sync();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared.key_full(stage, group));
  }

  // This lane's FP8 values for a slab of elements; zeros if there is no key.
  __device__ __forceinline__ void load_fp8(uint32_t (&fp8)[2][4], int stage, int group, int slab, bool exists) const {
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) fp8[chunk][i] = 0;
      if (!exists) continue;
      ptx::ld_shared_128(fp8[chunk],
                         shared.key(stage).chunk(key, group * 4 + 2 + slab / 2, slab % 2 * 4 + half * 2 + chunk));
    }
  }

  // Missing keys become zeros. FP8 values are read one slab ahead.
  __device__ __forceinline__ void convert(int stage, int parity, int group, const uint32_t (&scales)[4],
                                          bool exists) const {
    wait_raw(stage, group, parity);
    uint32_t fp8[2][2][4];
    load_fp8(fp8[0], stage, group, 0, exists);
#pragma unroll
    for (int slab = 0; slab < 4; ++slab) {
      if (slab < 3) load_fp8(fp8[(slab + 1) % 2], stage, group, slab + 1, exists);
      if (slab == 2)
        ptx::warp_sync();  // write after read: the FP8 values of the last two slabs, which the warp has read now
      const float scale = ptx::bits_float(scales[group * 2 + slab / 2]);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        uint32_t words[4];
        const uint32_t (&fp8_chunk)[4] = fp8[slab % 2][chunk / 2];
        dequantize<Element>(words, fp8_chunk[chunk % 2 * 2], fp8_chunk[chunk % 2 * 2 + 1], scale);
        ptx::st_shared_128(shared.key(stage).chunk(key, group * 4 + slab, half * kChunks + chunk), words);
      }
    }
  }

  // The rotary columns already are elements.
  __device__ __forceinline__ void pass_rotary(int stage, int parity, bool exists) const {
    wait_raw(stage, kRotary, parity);
    if (!exists) {
      const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        ptx::st_shared_128(shared.key(stage).chunk(key, Spec::kRotarySlab, half * kChunks + chunk), zeros);
      }
    }
  }

  // Scales are loaded one block ahead, their page two.
  __device__ __forceinline__ void run(TileScheduler& scheduler) {
    WorkTile work;
    while (scheduler.next(work)) {
      const int blocks = work.end_block - work.begin_block;
      int page = get_page(work, work.begin_block);
      uint32_t scales[4];
      load_scales(scales, work.begin_block, page);
      bool exists = page >= 0;
      page = get_page(work, work.begin_block + 1);
#pragma unroll 1
      for (int index = 0; index < blocks; ++index) {
        const int stage = index % Spec::kNumStages;
        const int parity = uses.parity(index);
        uint32_t next_scales[4];
        load_scales(next_scales, work.begin_block + index + 1, page);
        const bool next_exists = page >= 0;
        page = get_page(work, work.begin_block + index + 2);
        convert(stage, parity, kLeft, scales, exists);
        announce(stage, kLeft);
        convert(stage, parity, kRight, scales, exists);
        pass_rotary(stage, parity, exists);
        announce(stage, kRight);
        exists = next_exists;
#pragma unroll
        for (int i = 0; i < 4; ++i) scales[i] = next_scales[i];
      }
      uses.end_work_tile(blocks);
    }
  }
};

}  // namespace flashmoe::mla::sm90
