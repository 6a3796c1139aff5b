// Four warps make elements of 8-bit floats, each of 16 keys of a block, two lanes for each key: from the codes' stage, where a key is 656 bytes
// as in the cache, to the groups that the products read.
//
// Keys 656 bytes apart lie four banks apart, so eight lanes read 16 bytes of eight keys without a conflict.
#pragma once

#include "device/ring.cuh"
#include "mla/dequantize.cuh"
#include "mla/params/codes.h"
#include "mla/plan.cuh"
#include "mla/sm90_few/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm90_few {

template <typename Spec>
struct Converter {
  using Element = typename Spec::Element;
  static constexpr int kCodeChunks = 2;  // 16 bytes each: half of a slab's row
  static constexpr int kChunks = 4;      // of its elements

  const DecodeParams& params;
  const SharedMemory<Spec> shared;
  const int key;   // of the block
  const int half;  // of a slab's row
  RingPosition<Spec::kNumStages> ring;
  RingPosition<Spec::kCodeStages> codes;

  __device__ __forceinline__ Converter(const DecodeParams& params_, const SharedMemory<Spec>& shared_, int warp)
      : params(params_),
        shared(shared_),
        key(warp * Spec::kStageKeys + ptx::lane_index() % Spec::kStageKeys),
        half(ptx::lane_index() / Spec::kStageKeys) {
    codes.advance_by(warp);
  }

  // This lane's bytes of a group: codes of its value slabs, and the rotary elements behind the last of them.
  __device__ __forceinline__ void load(uint32_t (&bytes)[Spec::kGroupSlabs][kChunks][4], const unsigned char* key_smem,
                                       int group) const {
#pragma unroll
    for (int slab = 0; slab < Spec::kGroupSlabs; ++slab) {
      const int of_key = group * Spec::kGroupSlabs + slab;
      const bool is_rotary = of_key == Spec::kValueSlabs;
      const int first =
          is_rotary ? kRotaryBytesOffset + half * kChunks * 16 : of_key * kSlabColumns + half * kCodeChunks * 16;
#pragma unroll
      for (int chunk = 0; chunk < (is_rotary ? kChunks : kCodeChunks); ++chunk) {
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
          const uint32_t (&own)[4] = bytes[slab][chunk / 2];
          dequantize<Element>(words, own[chunk % 2 * 2], own[chunk % 2 * 2 + 1],
                              ptx::bits_float(scales[of_key * kSlabColumns / kScaleColumns]));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = exists ? words[i] : 0;
        ptx::st_shared_128(tile.chunk(key, slab, half * kChunks + chunk), words);
      }
    }
  }

  // A block's keys; those that do not exist become zeros. Codes are read a group ahead.
  __device__ __forceinline__ void convert(bool exists) {
    ptx::mbarrier_wait(shared.codes_full(codes.stage), codes.parity);
    const unsigned char* key_smem = shared.codes(codes.stage) + key % Spec::kStageKeys * kCodedKeyBytes;
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
        if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared.codes_empty(codes.stage));
      }
      ptx::mbarrier_wait(shared.key_empty(ring.stage), ring.parity ^ 1);
      store(bytes[group % 2], scales, group, exists);
      ptx::fence_proxy_async_shared();
      ptx::warp_sync();
      if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared.key_full(ring.stage));
      ring.advance();
    }
    codes.advance_by(Spec::kCodeStagesOfBlock);
  }

  __device__ __forceinline__ void run(Plan& plan) {
    Segment segment;
    while (plan.next(segment)) {
#pragma unroll 1
      for (int block = segment.begin_block; block < segment.end_block; ++block) {
        convert(block * Spec::kBlockN + key < segment.keys);
      }
    }
  }
};

}  // namespace flashmoe::mla::sm90_few
