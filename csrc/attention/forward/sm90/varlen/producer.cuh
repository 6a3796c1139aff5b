// The loading thread of the varlen kernels: it issues the TMA loads of Q, K and V for the tiles that the scheduling
// warp finds (scheduler.cuh) and passes the tiles to the consumers. It is a single thread, so that the operands of its
// loads are in uniform registers from the start, as TMA needs them.
#pragma once

#include "attention/forward/sm90/spec.cuh"
#include "attention/forward/sm90/varlen/chunk_words.h"
#include "attention/forward/sm90/varlen/codes.cuh"
#include "attention/forward/sm90/varlen/folded.cuh"
#include "attention/forward/sm90/varlen/schedule.cuh"
#include "attention/forward/sm90/varlen/scheduler.cuh"
#include "attention/sequences.cuh"
#include "device/persistent.cuh"
#include "device/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

namespace flashmoe::attention::sm90 {

template <typename Spec>
struct VarlenProducer {
  const ForwardParams& params;
  const SharedMemory<Spec> shared;
  const ptx::TensorMap& q_map;
  const ptx::TensorMap& k_map;
  const ptx::TensorMap& v_map;
  const ptx::TensorMap& mask_map;  // if Spec streams a mask
  RingPosition<Spec::kNumStages> key;
  RingPosition<Spec::kNumStages> value;
  RingPosition<Spec::kNumQueryStages> query;
  RingPosition<2> code;

  __device__ __forceinline__ VarlenProducer(const ForwardParams& params_, const SharedMemory<Spec>& shared_,
                                            const ptx::TensorMap& q_map_, const ptx::TensorMap& k_map_,
                                            const ptx::TensorMap& v_map_, const ptx::TensorMap& mask_map_)
      : params(params_), shared(shared_), q_map(q_map_), k_map(k_map_), v_map(v_map_), mask_map(mask_map_) {}

  // Loads one box of rows of K or V, slab by slab. The hint is a compile-time constant: with a run-time hint the
  // compiler checks before each copy whether lanes agree, and chunks of 128 and more rows took 3% to 8% longer.
  template <typename Tile, ptx::CacheHint kHint>
  static __device__ __forceinline__ void load_box(unsigned char* smem, const ptx::TensorMap& map, ptx::Mbarrier* full,
                                                  int row, int kv_head, int batch, int column) {
#pragma unroll
    for (int slab = 0; slab < Tile::kNumSlabs; ++slab) {
      ptx::tma_load_4d(smem + slab * Tile::kSlabBytes, &map, full, column + slab * 64, row, kv_head, batch, kHint);
    }
  }

  // Keys without pages: a block is one box.
  template <ptx::CacheHint kHint>
  struct Rows {
    const ForwardParams& params;
    const NextTile& next;

    __device__ __forceinline__ int find(int block) const { return next.first_key + block * Spec::kBlockN; }
    // The same for V; for transposed codes the first of the block's rows, which are columns of V.
    __device__ __forceinline__ int find_value(int block) const {
      if constexpr (!Spec::kHasCodes) return find(block);
      return (first_value_block(next.first_key, next.tile.batch) + block) * Spec::kHeadDim;
    }
    template <typename Tile>
    __device__ __forceinline__ void load(Tile tile, const ptx::TensorMap& map, ptx::Mbarrier* full, int row,
                                         int column = 0) const {
      load_box<Tile, kHint>(tile.smem, map, full, row, next.kv_head,
                            params.sequences.cu_seqlens_k == nullptr ? next.tile.batch : 0, column);
    }
  };

  // Keys in pages: a box has page_box_rows rows (tensor_map.h). Boxes past the sequence's last key are loaded as well.
  // TMA fills pages that do not exist with zeros: past the last key, and where the table no longer has the pages before
  // a window. Scores there are masked, but P = 0 times NaN is NaN.
  template <ptx::CacheHint kHint>
  struct Pages {
    static constexpr int kSmallestBoxes = Spec::kBlockN / 16;
    static constexpr int kBoxes = kSmallestBoxes % 4 == 0   ? 4
                                  : kSmallestBoxes % 3 == 0 ? 3
                                  : kSmallestBoxes % 5 == 0 ? 5
                                                            : 7;  // boxes that are requested together
    static_assert(Spec::kBlockN % (16 * kBoxes) == 0, "blocks are 1, 2 or a multiple of kBoxes boxes");
    static constexpr int kNoPage = -1;
    const ForwardParams& params;
    const NextTile& next;
    const int box_rows;

    __device__ __forceinline__ Pages(const ForwardParams& params_, const NextTile& next_)
        : params(params_), next(next_), box_rows(rows_of_box(params_.sequences.page_size | Spec::kBlockN)) {}
    static __device__ __forceinline__ int rows_of_box(int both) { return both & -both; }

    // The location of boxes of a block: in page `index` of the sequence, from `row` on.
    struct Boxes {
      int key;
      int index;
      int row;
      int pages[kBoxes];
    };
    __device__ __forceinline__ void look_up(Boxes& boxes) const {
      int index = boxes.index;
      int row = boxes.row;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int in_block = box * box_rows;
        const bool is_there = in_block < Spec::kBlockN && boxes.key + in_block < next.tile.keys;
        boxes.pages[box] = is_there ? next.tile.sequence(params).load_page(index) : kNoPage;
        step(index, row);
      }
    }
    __device__ __forceinline__ void step(int& index, int& row) const {
      row += box_rows;
      if (row >= params.sequences.page_size) {
        row = 0;
        ++index;
      }
    }
    __device__ __forceinline__ Boxes find_value(int block) const { return find(block); }
    __device__ __forceinline__ Boxes find(int block) const {
      Boxes boxes;
      boxes.key = block * Spec::kBlockN;
      boxes.index = boxes.key / params.sequences.page_size;
      boxes.row = boxes.key - boxes.index * params.sequences.page_size;
      look_up(boxes);
      return boxes;
    }

    template <int kNumBoxes, typename Tile>
    __device__ __forceinline__ void load_boxes(unsigned char* smem, const ptx::TensorMap& map, ptx::Mbarrier* full,
                                               Boxes& boxes, int column) const {
#pragma unroll
      for (int box = 0; box < kNumBoxes; ++box) {
        load_box<Tile, kHint>(smem + box * box_rows * 128, map, full, boxes.row, next.kv_head, boxes.pages[box],
                              column);
        step(boxes.index, boxes.row);
      }
    }
    template <typename Tile>
    __device__ __forceinline__ void load(Tile tile, const ptx::TensorMap& map, ptx::Mbarrier* full, Boxes boxes,
                                         int column = 0) const {
      if (box_rows == Spec::kBlockN) {
        load_boxes<1, Tile>(tile.smem, map, full, boxes, column);
      } else if (2 * box_rows == Spec::kBlockN) {
        load_boxes<2, Tile>(tile.smem, map, full, boxes, column);
      } else {
        const int rows = kBoxes * box_rows;
        load_boxes<kBoxes, Tile>(tile.smem, map, full, boxes, column);
        for (int row = rows; row < Spec::kBlockN; row += rows) {
          boxes.key += rows;
          look_up(boxes);
          load_boxes<kBoxes, Tile>(tile.smem + row * 128, map, full, boxes, column);
        }
      }
    }
  };

  // Loads K or V of a block as codes, and publishes what the converting warps need to know about it.
  template <typename Source, typename Where>
  __device__ __forceinline__ void load_codes(const Source& source, const ptx::TensorMap& map, const Where& where,
                                             int block) {
    ptx::Mbarrier* full = shared.codes_full(code.stage);
    ptx::mbarrier_wait(shared.codes_empty(code.stage), code.parity ^ 1);
    const VarlenTile& tile = source.next.tile;
    publish_tile(shared.code_block(code.stage),
                 CodeBlock{tile.keys - block * Spec::kBlockN, tile.batch, source.next.kv_head, block * Spec::kBlockN});
    ptx::mbarrier_arrive_expect_tx(full, Spec::CodeTile::kBytes);
    source.load(shared.codes(code.stage), map, full, where);
    code.advance();
  }

  template <typename Source>
  __device__ __forceinline__ void load_key(const Source& source, int block) {
    if constexpr (Spec::kConvertsCodes) return load_codes(source, k_map, source.find(block), block);
    ptx::Mbarrier* full = shared.key_full(key.stage);
    const auto where = source.find(block);
    if constexpr (Spec::kKeyParts == 1) ptx::mbarrier_wait(shared.key_empty(key.stage), key.parity ^ 1);
    if constexpr (Spec::kKeyParts > 1) {
#pragma unroll 1
      for (int part = 0; part < Spec::kKeyParts; ++part) {
        ptx::mbarrier_wait(shared.key_empty(key.stage, part), key.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(full + part, Spec::KeyPart::kBytes);
        source.load(shared.key_part(key.stage, part), k_map, full + part, where,
                    part * Spec::KeyPart::kNumSlabs * kSlabColumns);
      }
    } else if constexpr (Spec::kStreamsMask) {
      ptx::mbarrier_arrive_expect_tx(full, Spec::KeyTile::kBytes + Spec::kNumConsumers * Spec::MaskTile::kBytes);
      source.load(shared.key(key.stage), k_map, full, where);
      load_mask(source.next.tile, block, full);
    } else {
      ptx::mbarrier_arrive_expect_tx(full, Spec::KeyTile::kBytes);
      source.load(shared.key(key.stage), k_map, full, where);
    }
    key.advance();
  }
  // Loads the mask of a block for every warpgroup's rows. Rows and keys outside the mask become zeros.
  __device__ __forceinline__ void load_mask(const VarlenTile& tile, int block, ptx::Mbarrier* full) const {
    const ScoreOptions& options = params.score_options;
    const int head = options.mask_stride_head == 0 ? 0 : tile.head;
    const int batch = options.mask_stride_batch == 0 ? 0 : tile.batch;
#pragma unroll
    for (int consumer = 0; consumer < Spec::kNumConsumers; ++consumer) {
#pragma unroll
      for (int slab = 0; slab < Spec::MaskTile::kNumSlabs; ++slab) {
        ptx::tma_load_4d(shared.mask(key.stage, consumer).slab(slab), &mask_map, full,
                         block * Spec::kBlockN + slab * 64, tile.m_block * Spec::kBlockM + consumer * 64, head, batch,
                         ptx::CacheHint::kEvictNormal);  // heads and sequences may share it
      }
    }
  }
  template <typename Source>
  __device__ __forceinline__ void load_value(const Source& source, int block, ptx::Mbarrier* full) {
    if constexpr (Spec::kConvertsCodes) return load_codes(source, v_map, source.find(block), block);
    const auto where = source.find_value(block);
    ptx::mbarrier_wait(shared.value_empty(value.stage), value.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, Spec::ValueTile::kBytes);
    source.load(shared.value(value.stage), v_map, full, where,
                Spec::kValueParts == 1 ? 0 : source.next.part * Spec::kValueDim);
    value.advance();
  }

  // The tile as a consumer warpgroup sees it. If heads share the tile, the rows of each head are numbered from its
  // first warpgroup on, as if empty rows preceded the sequence, so that consumers need no special case. Warpgroups
  // without a head have no rows.
  static __device__ __forceinline__ VarlenTile own_tile(int consumer, const NextTile& next) {
    VarlenTile tile = next.tile;
    if constexpr (Spec::kIsFolded) return tile;
    const int warpgroups = Spec::kNumConsumers >= 4 && tile.rows > 64 ? 2 : 1;  // of a head
    const int head = consumer / warpgroups;
    if (head < next.heads) {
      tile.head += head;
      tile.first_row -= head * warpgroups * 64;
      tile.rows += head * warpgroups * 64;
    }
    return tile;
  }

  // Loads the rows of Q of one consumer warpgroup, if it has any, and publishes their tile.
  __device__ __forceinline__ void load_query(int consumer, const NextTile& next) const {
    ptx::Mbarrier* full = shared.query_full(query.stage, consumer);
    ptx::mbarrier_wait(shared.query_empty(query.stage, consumer), query.parity ^ 1);
    const VarlenTile tile = own_tile(consumer, next);
    if constexpr (Spec::kValueParts == 1) {
      publish_tile(shared.tile(query.stage, consumer), tile);
    } else {
      VarlenTile with_part = tile;
      with_part.head = tile.head * Spec::kValueParts + next.part;
      publish_tile(shared.tile(query.stage, consumer), with_part);
    }
    const int row = position_of<Spec>(tile, tile.m_block * Spec::kBlockM + consumer * 64);
    if (row >= tile.rows) {
      ptx::mbarrier_arrive(full);
      return;
    }
    const bool is_ragged = params.sequences.cu_seqlens_q != nullptr;
    ptx::mbarrier_arrive_expect_tx(full, Spec::QueryTile::kBytes);
#pragma unroll
    for (int slab = 0; slab < Spec::QueryTile::kNumSlabs; ++slab) {
      if constexpr (Spec::kIsFolded) {
        ptx::tma_load_5d(shared.query(query.stage, consumer).slab(slab), &q_map, full, slab * 64, 0,
                         tile.first_row + row, next.kv_head, is_ragged ? 0 : tile.batch, ptx::CacheHint::kEvictFirst);
        continue;
      }
      ptx::tma_load_4d(shared.query(query.stage, consumer).slab(slab), &q_map, full, slab * 64, tile.first_row + row,
                       tile.head, is_ragged ? 0 : tile.batch, ptx::CacheHint::kEvictFirst);
    }
  }

  // The order of the dense kernels: K of the first block, Q of warpgroup 0, V, Q of the others, then K(j), V(j) in
  // ascending order. (K one block ahead of V, the order in which the consumers release the buffers: 3% slower at 4096
  // keys, 7% to 12% at 16384.)
  template <typename Source>
  __device__ __forceinline__ void load_tile(const Source& source, const NextTile& next, int slot) {
    const VarlenTile& tile = next.tile;
    const KeyRange& range = tile.blocks;
    const int draw = draw_block(range);
    const int tail_block = has_tail<Spec>(tile) ? range.end - 1 : range.end;
    const auto value_barrier = [&](int block) {
      return block == tail_block ? shared.tail_full(slot) : shared.value_full(value.stage);
    };
    if constexpr (Spec::kKeyParts > 1) {  // one stage: in the order in which the consumers release the buffers
#pragma unroll 1
      for (int block = range.begin; block <= range.end; ++block) {
        if (block == draw) ptx::mbarrier_arrive(shared.next_tile_wanted());
        if (block < range.end) load_key(source, block);
        if (block > range.begin) {
          load_value(source, block - 1, value_barrier(block - 1));
        } else {
          for (int consumer = 0; consumer < Spec::kNumConsumers; ++consumer) load_query(consumer, next);
        }
      }
      return;
    }
    if (range.begin == draw) ptx::mbarrier_arrive(shared.next_tile_wanted());
    load_key(source, range.begin);
    load_query(0, next);
    load_value(source, range.begin, value_barrier(range.begin));
#pragma unroll
    for (int consumer = 1; consumer < Spec::kNumConsumers; ++consumer) load_query(consumer, next);
    for (int block = range.begin + 1; block < range.end; ++block) {
      if (block == draw) ptx::mbarrier_arrive(shared.next_tile_wanted());
      load_key(source, block);
      load_value(source, block, value_barrier(block));
    }
  }

  template <ptx::CacheHint kHint>
  __device__ __forceinline__ void load_tile(const NextTile& next, int slot) {
    if (Spec::kHasCodes || Spec::kStreamsMask || params.sequences.block_table == nullptr) {
      load_tile(Rows<kHint>{params, next}, next, slot);
    } else {
      load_tile(Pages<kHint>(params, next), next, slot);
    }
  }

  // Keys are read again for the other tiles of a head, except by kernels of 64 rows; for chunks the host decides.
  __device__ __forceinline__ void load_tile(const NextTile& next, int slot) {
    if constexpr (Spec::kIsFolded && !Spec::kConvertsCodes) {
      if ((params.hints & kReadsKeysOnce) != 0) {
        load_tile<ptx::CacheHint::kEvictFirst>(next, slot);
        return;
      }
    }
    load_tile<Spec::kNumConsumers == 1 ? ptx::CacheHint::kEvictFirst : ptx::CacheHint::kEvictLast>(next, slot);
  }

  __device__ __forceinline__ void run() {
    for (int slot = 0, parity = 0;; query.advance()) {
      ptx::mbarrier_wait(shared.next_tile_full(slot), parity);
      const auto next = read_tile<NextTile>(shared.next_tile(slot));
      if (next.tile.m_block < 0) break;
      load_tile(next, slot);
      parity ^= slot;
      slot ^= 1;
    }
#pragma unroll
    for (int consumer = 0; consumer < Spec::kNumConsumers; ++consumer) {
      ptx::mbarrier_wait(shared.query_empty(query.stage, consumer), query.parity ^ 1);
      publish_tile(shared.tile(query.stage, consumer), VarlenTile{-1, 0, 0, 0, 0, 0, KeyRange{0, 0}});
      ptx::mbarrier_arrive(shared.query_full(query.stage, consumer));
    }
    if constexpr (Spec::kConvertsCodes) {
      ptx::mbarrier_wait(shared.codes_empty(code.stage), code.parity ^ 1);
      publish_tile(shared.code_block(code.stage), CodeBlock{CodeBlock::kEnd, 0, 0, 0});
      ptx::mbarrier_arrive(shared.codes_full(code.stage));
    }
  }
};

}  // namespace flashmoe::attention::sm90
