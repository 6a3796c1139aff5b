// The warpgroups that draw what a forward kernel drops, some blocks ahead of the consumers. Each thread draws for those of its number in a consumer.
#pragma once

#include "attention/dropout.cuh"
#include "attention/forward/sm90/schedule.cuh"
#include "attention/forward/sm90/spec.cuh"
#include "attention/forward/sm90/varlen/schedule.cuh"
#include "device/persistent.cuh"
#include "device/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

template <typename Spec>
struct Drawer {
  const ForwardParams& params;
  const SharedMemory<Spec> shared;
  RingPosition<Spec::kDrawnSlots> drawn;

  __device__ __forceinline__ Drawer(const ForwardParams& params_, const SharedMemory<Spec>& shared_)
      : params(params_), shared(shared_) {}

  // Of a draw's pairs of columns as KeptPair counts them, two a word: what permute_bytes takes of two packed weights to drop them. Digits of a
  // column that is kept name its bytes, those of a dropped one repeat its sign: no weight is negative.
  static __device__ __forceinline__ void draw_selectors(const HeadDropout& of_head, const Draw& draw, uint32_t either,
                                                        uint32_t (&selectors)[4]) {
    uint32_t words[4];
    const uint32_t addend = of_head.words_of(draw, words);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t low = (words[w] & 0x7F7F7F7F) + addend;
      words[w] = (words[w] & low) | ((words[w] | low) & either);
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t bytes = ptx::permute_bytes(words[b / 2 * 2], words[b / 2 * 2 + 1], b % 2 == 0 ? 0xD9C8 : 0xFBEA);
      selectors[b] = (bytes & 0x89898989) ^ 0xBB99BB99;
    }
  }

  __device__ __forceinline__ void run() {
    constexpr int kGroups = Spec::kNumDrawers / 4;  // which take turns
    const uint32_t thread = ptx::thread_index() % 128;
    const int group = ptx::warp_index() / 4 % kGroups;
    HeadDropout of_head(dropout_of(params), 0, 0);
    // As kept() has it, but a register.
    const uint32_t either = ptx::recompute(dropout_of(params).threshold < 128 << 8 ? 0xFFFFFFFFu : 0u);
    for (int slot = 0, parity = 0;;) {
      ptx::mbarrier_wait(shared.next_tile_full(slot), parity);
      const auto tile = read_tile<VarlenTile>(shared.next_tile(slot));
      ptx::warp_sync();  // all lanes have read it before the first one says so
      if (tile.m_block < 0) return;
      if (thread % 32 == 0) ptx::mbarrier_arrive(shared.next_tile_wanted());
      of_head.head = static_cast<uint32_t>(tile.head);
      of_head.sequence = static_cast<uint32_t>(tile.batch);
      const uint32_t of_head_point = of_head.draw(0, 0).point;
      const int first_row = tile.m_block * Spec::kBlockM;
      const int consumers = minimum(Spec::kNumConsumers, ceil_div(tile.rows - first_row, 64));
      for (int block = tile.blocks.begin; block < tile.blocks.end; ++block) {
        if (kGroups > 1 && drawn.stage % kGroups != group) {  // the other warpgroup's
          drawn.advance();
          continue;
        }
        // Hazard: a consumer has yet to read the words that were here.
        ptx::mbarrier_wait(shared.drawn_empty(drawn.stage), drawn.parity ^ 1);
        for (int consumer = 0; consumer < consumers; ++consumer) {
          const uint32_t rows = (first_row + consumer * 64) / 2 + thread / 32 * 8 + thread % 32 / 4;
          const uint32_t keys = block * (Spec::kBlockN / 8) + thread % 4;
          const Draw first{keys, rows, of_head_point + rows * kRowStep + keys * kKeyStep};
#pragma unroll 1
          for (int i = 0; i < Spec::kDraws; i += 2) {  // two at a time: their chains overlap
            uint32_t selectors[2][4];
#pragma unroll
            for (int d = 0; d < 2; ++d) draw_selectors(of_head, first.further(0, i + d), either, selectors[d]);
#pragma unroll
            for (int d = 0; d < 2; ++d)
              ptx::st_shared_128(shared.drawn(drawn.stage, consumer, i + d, thread), selectors[d]);
          }
        }
        ptx::warp_sync();
        if (thread % 32 == 0) ptx::mbarrier_arrive(shared.drawn_full(drawn.stage));
        drawn.advance();
      }
      parity ^= slot;
      slot ^= 1;
    }
  }
};

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
