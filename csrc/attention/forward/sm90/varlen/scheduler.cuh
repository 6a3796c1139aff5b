// The scheduling warp of the varlen kernels: it finds the tiles for the loading thread, one ahead, and clears the rows
// of V past a sequence's last key. All lanes iterate together over the sequences of the batch, 32 at a time.
#pragma once

#include "attention/forward/sm90/spec.cuh"
#include "attention/forward/sm90/varlen/folded.cuh"
#include "attention/forward/sm90/varlen/schedule.cuh"
#include "attention/params/bool_mask.h"
#include "attention/sequences.cuh"
#include "device/persistent.cuh"
#include "device/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm90 {

// The key block of a tile before which the loading thread requests the next tile (device/persistent.cuh).
__device__ __forceinline__ int draw_block(const KeyRange& blocks) {
  return maximum(blocks.begin, blocks.end - 1 - kDrawAhead);
}
template <typename Spec>
__device__ __forceinline__ bool has_tail(const VarlenTile& tile) {
  return !Spec::kHasCodes && !Spec::kConvertsCodes &&
         tile.keys < tile.blocks.end * Spec::kBlockN;  // transposed V and converted codes have zeros there
}

// Blocks that a streamed mask hides as a whole. Empty without a streamed mask; a base class, so that it takes no space
// there.
template <typename Spec, bool kStreamsMask = Spec::kStreamsMask>
struct MaskedTiles {
  __device__ __forceinline__ explicit MaskedTiles(const VisibleBlocks*) {}
  __device__ __forceinline__ void narrow(VarlenTile&) const {}
};
template <typename Spec>
struct MaskedTiles<Spec, true> {
  const VisibleBlocks& visible;

  __device__ __forceinline__ explicit MaskedTiles(const VisibleBlocks* visible_) : visible(*visible_) {}

  // Narrows the tile's key blocks to those from the first to the last that some row sees, or to the last if there is
  // none.
  // Bits do not change: scores of -inf add nothing. Called by all lanes.
  __device__ __forceinline__ void narrow(VarlenTile& tile) const {
    static_assert(Spec::kBlockM % kMaskBlock == 0 && Spec::kBlockN == kMaskBlock, "a tile is whole blocks of the mask");
    constexpr int kRowBlocks = Spec::kBlockM / kMaskBlock;
    if (visible.words == nullptr) return;
    const int first_row = tile.m_block * kRowBlocks;
    const int rows = minimum(kRowBlocks, visible.row_blocks - first_row);
    const int matrix = tile.batch * visible.per_sequence + tile.head * visible.per_head;
    const int32_t* words_gmem = visible.words + (matrix * visible.row_blocks + first_row) * visible.key_words;
    const int all = visible.key_words * kMaskWordBlocks;
    int from_end = 0;  // key blocks from the first visible one to the last of all words
    int end = 0;
#pragma unroll 1
    for (int word = ptx::lane_index(); word < visible.key_words; word += 32) {
      uint32_t seen = 0;
#pragma unroll 1
      for (int row = 0; row < rows; ++row) seen |= ptx::ld_global_32(words_gmem + row * visible.key_words + word);
      if (seen == 0) continue;
      const int first = (seen & 0xff) != 0 ? 0 : (seen & 0xffff) != 0 ? 1 : (seen & 0xffffff) != 0 ? 2 : 3;
      const int last = seen >> 24 != 0 ? 4 : seen >> 16 != 0 ? 3 : seen >> 8 != 0 ? 2 : 1;
      from_end = maximum(from_end, all - (word * kMaskWordBlocks + first));
      end = word * kMaskWordBlocks + last;
    }
    from_end = static_cast<int>(ptx::reduce_max(static_cast<uint32_t>(from_end)));
    end = static_cast<int>(ptx::reduce_max(static_cast<uint32_t>(end)));
    KeyRange& blocks = tile.blocks;
    blocks.begin = minimum(maximum(blocks.begin, all - from_end), blocks.end - 1);
    blocks.end = maximum(minimum(blocks.end, end), blocks.begin + 1);
  }
};

template <typename Spec>
struct TileScheduler : MaskedTiles<Spec> {
  const ForwardParams& params;
  const SharedMemory<Spec> shared;
  const int lane;
  RingPosition<Spec::kNumStages> value;  // ring position of V of the tile's first block
  int tail_parity[2] = {0, 0};
  SequenceIterator<Spec> sequences;

  __device__ __forceinline__ TileScheduler(const ForwardParams& params_, const SharedMemory<Spec>& shared_,
                                           const VisibleBlocks* visible)
      : MaskedTiles<Spec>(visible), params(params_), shared(shared_), lane(ptx::lane_index()), sequences(params_) {}

  // V of a tile's last block arrives at one of two separate barriers, alternately. Rows past the last key are undefined
  // and may be NaN, and P = 0 times NaN is NaN: they are set to zero before the consumers are notified.
  struct Tail {
    int slot;
    int stage;
    int first_row;  // the first row past the sequence's last key
  };
  __device__ __forceinline__ void finish_tail(const Tail& tail) {
    const int parity = tail.slot == 0 ? tail_parity[0] : tail_parity[1];
    ptx::mbarrier_wait(shared.tail_full(tail.slot), parity);
    tail_parity[0] ^= tail.slot == 0;
    tail_parity[1] ^= tail.slot;
    const auto value_rows = shared.value(tail.stage);
    const uint32_t zeros[4] = {0, 0, 0, 0};
    constexpr int kRowsAtOnce = 32 / 8;
    for (int row = tail.first_row + lane / 8; row < Spec::kBlockN; row += kRowsAtOnce) {
#pragma unroll
      for (int slab = 0; slab < Spec::kNumValueSlabs; ++slab) {
        ptx::st_shared_128(value_rows.row(row, slab) + lane % 8 * 16, zeros);
      }
    }
    // Hazard: the tensor cores read V before these stores are visible to them.
    ptx::fence_proxy_async_shared();
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(shared.value_full(tail.stage));
  }

  __device__ __forceinline__ void publish(int slot, const NextTile& next) const {
    if (lane != 0) return;
    flashmoe::publish_tile(shared.next_tile(slot), next);
    ptx::mbarrier_arrive(shared.next_tile_full(slot));
  }

  // The tile of this thread block after `index`. Called by all lanes.
  __device__ __forceinline__ int draw(int num_tiles, int index) const {
    int next_index = 0;
    if (lane == 0) next_index = next_tile_index(params.tile_counter, num_tiles, index);
    return ptx::shuffle_index(next_index, 0);
  }

  // sequences.start() must have been called. A slot is free again once its reader has requested the next tile.
  __device__ __forceinline__ void run() {
    const int num_tiles = sequences.count_tiles();
    int index = ptx::block_index();
    Tail tail{0, 0, -1};  // of the previous tile, still to be cleared
    for (int slot = 0;; slot ^= 1) {
      NextTile next{{-1, 0, 0, 0, 0, 0, KeyRange{0, 0}}, 0, 0, 0, 0};
      if constexpr (Spec::kIsFolded) {
        for (; index < num_tiles; index = draw(num_tiles, index)) {
          const NextTile found = decode_folded_tile<Spec>(params, sequences, index);
          const bool has_share = found.tile.blocks.begin < found.tile.blocks.end;
          if (has_share) next = found;
          if (has_share) break;
          clear_share<Spec>(params, found.tile);
        }
      } else if (index < num_tiles) {
        next = decode_tile<Spec>(params, sequences, index);
        this->narrow(next.tile);
      }
      const bool is_end = index >= num_tiles;
      const VarlenTile& tile = next.tile;
      publish(slot, next);
      if (tail.first_row >= 0) finish_tail(tail);
      if (is_end) return;
      // The loading thread requests the next tile no later than it loads this block, so the tail is cleared after that
      // tile has been found.
      const int last_block = tile.blocks.end - 1;
      value.advance_by(last_block - tile.blocks.begin);
      tail = Tail{slot, value.stage, has_tail<Spec>(tile) ? maximum(0, tile.keys - last_block * Spec::kBlockN) : -1};
      value.advance();
      ptx::mbarrier_wait(shared.next_tile_wanted(), slot);
      index = draw(num_tiles, index);
    }
  }
};

}  // namespace flashmoe::attention::sm90
