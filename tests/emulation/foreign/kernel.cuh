// A kernel of another project: C[16][8] = A[16][K] B[8][K]^T, fp16 in, fp32 out, K = 16 * tiles. Four warps take tiles
// in turn, by cp.async, ldmatrix and mma, and add their partial sums through shared memory. It uses the wrappers and
// nothing else of the project that the emulation comes from. BUG selects a planted bug.
#pragma once

#include "ptx/elements.cuh"

#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/special_registers.cuh"

#ifndef BUG
#define BUG 0
#endif

namespace foreign {

using namespace flashmoe::ptx;

struct Params {
  const F16* a;  // [tiles][16][16]
  const F16* b;  // [tiles][8][16]
  float* c;      // [16][8]
  int tiles;
};

constexpr int kWarps = 4;
constexpr int kTileBytes = 768;                  // A, then B
constexpr int kSumOffset = kWarps * kTileBytes;  // [kWarps][128] floats
constexpr int kSharedBytes = kSumOffset + kWarps * 128 * 4;

__device__ inline void multiply(const Params& p, unsigned char* smem, float (&d)[4]) {
  const int lane = lane_index();
  const int last = p.tiles + (BUG == 4 ? 1 : 0);  // a tile that does not exist
  for (int tile = warp_index(); tile < last; tile += kWarps) {
    cp_async_16(smem + 16 * lane, p.a + tile * 256 + 8 * lane, 16);
    if (lane < 16) cp_async_16(smem + 512 + 16 * lane, p.b + tile * 128 + 8 * lane, 16);
    cp_async_commit();
    cp_async_wait<BUG == 1 ? 1 : 0>();  // the group that was just committed stays in flight
    if (BUG != 2) warp_sync();          // other lanes' copies
    uint32_t a[4], b[2];
    ldmatrix_x4(a, smem + lane % 16 * 32 + lane / 16 * 16);
    ldmatrix_x2(b, smem + 512 + lane % 8 * 32 + lane / 8 % 2 * 16);
    mma_m16n8k16<F16>(d, a, b[0], b[1]);
    warp_sync();  // before the next tile lands in the same place
  }
}

__device__ inline void add_up(const Params& p, unsigned char* smem, const float (&d)[4]) {
  float* sums = reinterpret_cast<float*>(smem + kSumOffset);
  const int lane = lane_index(), thread = thread_index();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    st_shared_float(sums + warp_index() * 128 + row * 8 + column, d[i]);
  }
  if (BUG != 3) barrier_sync_block();  // all warps' partial sums
  float sum = 0.0f;
  for (int warp = 0; warp < kWarps; ++warp) sum += ld_shared_float(sums + warp * 128 + thread);
  st_global_float(p.c + thread, sum);
}

__global__ void small_product(const Params p) {
  unsigned char* smem = dynamic_shared_memory();
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  multiply(p, smem + warp_index() * kTileBytes, d);
  add_up(p, smem, d);
}

}  // namespace foreign
