// Four warps convert 8-bit floats to elements, 16 keys of a block each, two lanes per key: from the FP8 stage, where
// a key is 656 bytes as in the cache, to the groups that the products read. Keys that indices select are gathered by
// the converting warp itself by cp.async, two blocks ahead: its stages are private, so they need no barrier.
//
// Keys 656 bytes apart are four banks apart, so eight lanes read 16 bytes of eight keys without a conflict.
#pragma once

#include "device/ring.cuh"
#include "mla/dequantize.cuh"
#include "mla/topk_indices.cuh"
#include "mla/params/fp8.h"
#include "mla/tile_scheduler.cuh"
#include "mla/sm90_few/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm90_few {

template <typename Spec>
struct Converter {
  using Element = typename Spec::Element;
  static constexpr int kFp8Chunks = 2;  // 16 bytes each: half of a slab's row
  static constexpr int kChunks = 4;     // of elements

  const DecodeParams& params;
  const SharedMemory<Spec> shared;
  const int key;   // of the block
  const int half;  // of a slab's row
  RingPosition<Spec::kNumStages> ring;
  RingPosition<Spec::kFp8Stages> fp8_ring;

  __device__ __forceinline__ Converter(const DecodeParams& params_, const SharedMemory<Spec>& shared_, int warp)
      : params(params_),
        shared(shared_),
        key(warp * Spec::kStageKeys + ptx::lane_index() % Spec::kStageKeys),
        half(ptx::lane_index() / Spec::kStageKeys) {
    fp8_ring.advance_by(warp);
  }

  // This lane's bytes of a group: FP8 values of its value slabs, and the rotary elements after the last of them.
  __device__ __forceinline__ void load(uint32_t (&bytes)[Spec::kGroupSlabs][kChunks][4], const unsigned char* key_smem,
                                       int group) const {
#pragma unroll
    for (int slab = 0; slab < Spec::kGroupSlabs; ++slab) {
      const int of_key = group * Spec::kGroupSlabs + slab;
      const bool is_rotary = of_key == Spec::kValueSlabs;
      const int first =
          is_rotary ? kRotaryBytesOffset + half * kChunks * 16 : of_key * kSlabColumns + half * kFp8Chunks * 16;
#pragma unroll
      for (int chunk = 0; chunk < (is_rotary ? kChunks : kFp8Chunks); ++chunk) {
        ptx::ld_shared_128(bytes[slab][chunk], key_smem + first + chunk * 16);
      }
    }
  }

  __device__ __forceinline__ void store(const uint32_t (&bytes)[Spec::kGroupSlabs][kChunks][4],
                                        const uint32_t (&scales)[4], int group, bool exists) const {
    const typename Spec::GroupTile tile = shared.group(ring.stage);
#pragma unroll
    for (int slab = 0; slab < Spec::kGroupSlabs; ++slab) {
      const int of_key = group * Spec::kGroupSlabs + slab;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        uint32_t words[4];
        if (of_key == Spec::kValueSlabs) {
#pragma unroll
          for (int i = 0; i < 4; ++i) words[i] = bytes[slab][chunk][i];
        } else {
          const uint32_t (&fp8_chunk)[4] = bytes[slab][chunk / 2];
          dequantize<Element>(words, fp8_chunk[chunk % 2 * 2], fp8_chunk[chunk % 2 * 2 + 1],
                              ptx::bits_float(scales[of_key * kSlabColumns / kScaleColumns]));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = exists ? words[i] : 0;
        ptx::st_shared_128(tile.chunk(key, slab, half * kChunks + chunk), words);
      }
    }
  }

  // Sparse: this lane's key of a block, as a row among all pages.
  __device__ __forceinline__ int load_topk_index(const WorkTile& work, int block) const {
    return block < work.end_block ? topk_index(params, work, block * Spec::kBlockN + key) : -1;
  }

  // Loads the warp's 16 keys of a block: eight lanes per 128 bytes of a key, and one lane per key for its last 16
  // bytes.
  __device__ __forceinline__ void gather(int64_t offset, const RingPosition<Spec::kFp8Stages>& to) const {
    constexpr int kRowLanes = 8;
    constexpr int kPassKeys = 32 / kRowLanes;
    constexpr int kPasses = Spec::kStageKeys / kPassKeys;
    constexpr int kRowChunks = kFp8KeyBytes / 16 / kRowLanes;
    static_assert(kFp8KeyBytes == (kRowLanes * kRowChunks + 1) * 16, "a chunk is left");
    const int lane = ptx::lane_index();
    const auto* cache_gmem = static_cast<const unsigned char*>(params.cache);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = pass * kPassKeys + lane / kRowLanes;
      const auto row_byte = static_cast<int64_t>(ptx::shuffle_index(static_cast<uint64_t>(offset), row));
      if (row_byte < 0) continue;
#pragma unroll
      for (int chunk = 0; chunk < kRowChunks; ++chunk) {
        const int byte = (chunk * kRowLanes + lane % kRowLanes) * 16;
        ptx::cp_async_16(shared.fp8(to.stage) + row * kFp8KeyBytes + byte, cache_gmem + row_byte + byte);
      }
    }
    if (lane < Spec::kStageKeys && offset >= 0) {
      constexpr int kLast = kFp8KeyBytes - 16;
      ptx::cp_async_16(shared.fp8(to.stage) + lane * kFp8KeyBytes + kLast, cache_gmem + offset + kLast);
    }
    ptx::cp_async_commit();
  }

  // Converts a block's keys; missing keys become zeros. FP8 values are read one group ahead. next: if sparse, this
  // lane's key two blocks ahead.
  __device__ __forceinline__ void convert(bool exists, int next = -1) {
    if constexpr (Spec::kIsSparse) {
      ptx::cp_async_wait<Spec::kFp8Stages / Spec::kFp8StagesPerBlock - 1>();
      ptx::warp_sync();
    } else {
      ptx::mbarrier_wait(shared.fp8_full(fp8_ring.stage), fp8_ring.parity);
    }
    const unsigned char* key_smem = shared.fp8(fp8_ring.stage) + key % Spec::kStageKeys * kFp8KeyBytes;
    uint32_t scales[4] = {0, 0, 0, 0};
    uint32_t bytes[2][Spec::kGroupSlabs][kChunks][4];
    if (exists) {
      ptx::ld_shared_128(scales, key_smem + kScaleBytesOffset);
      load(bytes[0], key_smem, 0);
    }
#pragma unroll
    for (int group = 0; group < Spec::kNumGroups; ++group) {
      if (group + 1 < Spec::kNumGroups) {
        if (exists) load(bytes[(group + 1) % 2], key_smem, group + 1);
      } else {
        ptx::warp_sync();
        if constexpr (Spec::kIsSparse) {
          gather(row_offset(params, next), fp8_ring);
        } else if (ptx::lane_index() == 0) {
          ptx::mbarrier_arrive(shared.fp8_empty(fp8_ring.stage));
        }
      }
      ptx::mbarrier_wait(shared.key_empty(ring.stage), ring.parity ^ 1);
      store(bytes[group % 2], scales, group, exists);
      ptx::fence_proxy_async_shared();
      ptx::warp_sync();
      if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared.key_full(ring.stage));
      ring.advance();
    }
    fp8_ring.advance_by(Spec::kFp8StagesPerBlock);
  }

  // Keys are loaded two blocks ahead, their indices three.
  __device__ __forceinline__ void run_sparse(const WorkTile& work) {
    static_assert(!Spec::kIsSparse || Spec::kFp8Stages == 2 * Spec::kFp8StagesPerBlock, "two stages for each warp");
    RingPosition<Spec::kFp8Stages> ahead = fp8_ring;
    bool exists[2];
#pragma unroll
    for (int index = 0; index < 2; ++index) {
      const int row = load_topk_index(work, work.begin_block + index);
      exists[index] = row >= 0;
      gather(row_offset(params, row), ahead);
      ahead.advance_by(Spec::kFp8StagesPerBlock);
    }
    int next = load_topk_index(work, work.begin_block + 2);
#pragma unroll 1
    for (int block = work.begin_block; block < work.end_block; ++block) {
      const int after = load_topk_index(work, block + 3);
      convert(exists[0], next);
      exists[0] = exists[1];
      exists[1] = next >= 0;
      next = after;
    }
  }

  __device__ __forceinline__ void run(TileScheduler& scheduler) {
    WorkTile work;
    while (scheduler.next(work)) {
      if constexpr (Spec::kIsSparse) {
        run_sparse(work);
      } else {
#pragma unroll 1
        for (int block = work.begin_block; block < work.end_block; ++block) {
          convert(block * Spec::kBlockN + key < work.keys);
        }
      }
    }
  }
};

}  // namespace flashmoe::mla::sm90_few
