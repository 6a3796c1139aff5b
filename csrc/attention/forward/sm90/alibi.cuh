// ALiBi by the tensor cores. Where all keys of a block are on one side of a row's own, the bias is slope * t plus a number of the row: t, the block's
// keys counted from the one nearest the row, is a table in shared memory, and slope * t one k-step more of S = Q K^T, with the slope in the registers
// of A. So a score costs no instruction. The row's number shifts its reference (shifted_softmax).
//
// A slope in three parts is exact in bf16, and closer than 2^-24 in fp16; t is exact in both, and so are the products. Which side a block is on is
// decided by row, so that a row's bits depend on its own position alone.
#pragma once

#include "attention/forward/sm90/softmax.cuh"
#include "attention/scores.cuh"
#include "device/convert.cuh"
#include "device/shared_tile.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

// The B of the step: rows k = 0 to 3 are for blocks before a row's own key, 4 to 7 for those behind it, and A is zero for the rest. By the second
// warpgroup, before the block's first barrier.
template <typename Element, int kBlockN, typename Tile>
__device__ __forceinline__ void write_alibi_table(const Tile& table) {
  static_assert(kBlockN <= 256, "bf16 has integers up to 256");
  const int index = ptx::thread_index() - 128;
  if (index < 0 || index >= 128) return;
  const int row = index / 8;
  const int chunk = index % 8;
#pragma unroll
  for (int slab = 0; slab < Tile::kNumSlabs; ++slab) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 64 * slab + 8 * chunk + 2 * i;
      const int from_nearest = row < 4 ? kBlockN - 1 - key : row < 8 ? key : 0;
      const int step = row < 4 ? -1 : row < 8 ? 1 : 0;
      words[i] = pack<Element>(static_cast<float>(from_nearest), static_cast<float>(from_nearest + step));
    }
    ptx::st_shared_128(table.chunk(row, slab, chunk), words);
  }
  // Hazard: the tensor cores read the table before it is there. The block's first barrier joins the threads.
  ptx::fence_proxy_async_shared();
}

// Of a tile and a thread, whose two rows are eight apart.
struct TileAlibi {
  float slope = 0.0f;  // what a distance is multiplied by, in scores
  int own = 0;         // the first row's own key
  uint32_t parts =
      0;  // this thread's two parts of the slope, of four in its half of a quad; 0 where no step may add them
  bool is_step = false;  // blocks beside the diagonal are the tensor cores'
  uint32_t a[4];         // of the step; in use until the scores are there

  // may_step: not under a softcap, which comes before the bias, nor in a consistent call, whose bits are the decoding kernels'.
  template <typename Element>
  __device__ __forceinline__ void start(float slope_, int own_, bool may_step) {
    slope = slope_;
    own = own_;
    is_step = may_step && fabsf(slope) <= 32768.0f;  // in fp16's range, and no NaN
    const float first = unpack<Element>(pack<Element>(slope, 0.0f)).x;
    const float rest = slope - first;
    const float second = unpack<Element>(pack<Element>(rest, 0.0f)).x;
    parts = ptx::lane_index() % 2 == 0 ? pack<Element>(first, second) : pack<Element>(rest - second, 0.0f);
    if (!is_step) parts = 0;
  }

  // From a block's first key to the own one of row r.
  template <int kBlockN>
  __device__ __forceinline__ int from_block(int block, int r) const {
    return own + 8 * r - block * kBlockN;
  }

  template <int kBlockN>
  __device__ __forceinline__ void make_operand(int block) {
    const bool is_before = ptx::lane_index() % 4 < 2;  // this lane's rows of the table
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int to_own = from_block<kBlockN>(block, r);
      a[r] = (is_before ? to_own >= kBlockN - 1 : to_own <= 0) ? parts : 0;
    }
    a[2] = a[3] = 0;
  }

  // What the scores of row r still lack: the same number in all of the block's columns.
  template <int kBlockN>
  __device__ __forceinline__ float shift(int block, int r) const {
    const int to_own = from_block<kBlockN>(block, r);
    const int keys = to_own >= kBlockN - 1 ? to_own - (kBlockN - 1) : to_own <= 0 ? -to_own : 0;
    return is_step ? slope * static_cast<float>(keys) : 0.0f;
  }

  // The rows that the step leaves out, score by score.
  template <int kBlockN>
  __device__ __forceinline__ void add(float (&scores)[kBlockN / 2], int block) const {
    const int lane = ptx::lane_index();
    const int first = from_block<kBlockN>(block, 0) - lane / 4;  // of the warp's first row
    if (is_step && (first >= kBlockN - 1 || first + 15 <= 0)) return;
    float slopes[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int to_own = from_block<kBlockN>(block, r);
      slopes[r] = is_step && (to_own >= kBlockN - 1 || to_own <= 0) ? 0.0f : slope;
    }
    const auto distance = static_cast<float>(from_block<kBlockN>(block, 0) - lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      const int r = i / 2 % 2;
      scores[i] = Alibi{slopes[r], distance}.add(scores[i], r, 8 * (i / 4) + i % 2);
    }
  }
};

// online_softmax of scores that lack shift[r] in every column. rows.max stays what it is for whole scores.
template <int kN, bool kMayBeEmpty>
__device__ __forceinline__ bool shifted_softmax(float (&scores)[kN / 2], RowState& rows, float (&rescale)[2],
                                                const float (&shift)[2], float scale_log2) {
  const float before[2] = {rows.max[0], rows.max[1]};
  float shifted[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.max[r] = shifted[r] = before[r] - shift[r];
  const bool moved = online_softmax<kN, kMayBeEmpty>(scores, rows, rescale, scale_log2);
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.max[r] = rows.max[r] == shifted[r] ? before[r] : rows.max[r] + shift[r];
  return moved;
}

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
