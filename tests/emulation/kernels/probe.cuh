// Single instructions on many inputs, for comparing the machine with a GPU bit by bit. Compiles with NVRTC (sm_90a) and
// for the CPU.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/wgmma.cuh"

namespace probe {

using namespace flashmoe::ptx;

struct Params {
  const unsigned char* a;  // [count][16 or 64][16] elements; floats for the functions
  const unsigned char* b;  // [count][16][8 or 64] elements, k-major
  const float* c;          // [count][16 or 64][8 or 64]
  float* d;
  int count;
};

__device__ inline const unsigned char* at(const unsigned char* base, int bytes) { return base + bytes; }

// Two neighbouring 16-bit elements of a row-major matrix as one register.
__device__ inline uint32_t pair(const unsigned char* base, int columns, int row, int column) {
  return ld_global_32(at(base, 2 * (row * columns + column)));
}

// One warp per block: d = a b + c, m16n8k16 (kDepth 16) or m16n8k8. b is [n][k] here, so that a fragment is one load.
template <typename Element, int kDepth>
__device__ inline void multiply(const Params& p) {
  const int lane = lane_index(), g = lane / 4, t = lane % 4;
  for (int i = block_index(); i < p.count; i += grid_size()) {
    const unsigned char* a = at(p.a, i * 16 * kDepth * 2);
    const unsigned char* b = at(p.b, i * 8 * kDepth * 2);
    float d[4];
    for (int e = 0; e < 4; ++e) d[e] = ld_global_float(p.c + i * 128 + (g + 8 * (e / 2)) * 8 + 2 * t + e % 2);
    if constexpr (kDepth == 16) {
      const uint32_t words[4] = {pair(a, 16, g, 2 * t), pair(a, 16, g + 8, 2 * t), pair(a, 16, g, 2 * t + 8),
                                 pair(a, 16, g + 8, 2 * t + 8)};
      mma_m16n8k16<Element>(d, words, pair(b, 16, g, 2 * t), pair(b, 16, g, 2 * t + 8));
    } else {
      mma_m16n8k8<Element>(d, pair(a, 8, g, 2 * t), pair(a, 8, g + 8, 2 * t), pair(b, 8, g, 2 * t));
    }
    for (int e = 0; e < 4; ++e) st_global_float(p.d + i * 128 + (g + 8 * (e / 2)) * 8 + 2 * t + e % 2, d[e]);
  }
}

// One warpgroup per block: d[64][64] = a[64][16] b + c, A from registers, b [n][k] in shared memory, 128-byte swizzle.
template <typename Element>
__device__ inline void warpgroup_multiply(const Params& p) {
  unsigned char* smem = dynamic_shared_memory();  // [64 n][64 k], of which k < 16 is used
  const int thread = thread_index(), lane = lane_index(), warp = warp_index(), g = lane / 4, t = lane % 4;
  for (int i = block_index(); i < p.count; i += grid_size()) {
    const unsigned char* a = at(p.a, i * 64 * 16 * 2);
    const unsigned char* b = at(p.b, i * 64 * 16 * 2);
    const int row = thread / 2, chunk = thread % 2;
    uint32_t words[4];
    ld_global_128(words, at(b, row * 32 + chunk * 16));
    st_shared_128(smem + row * 128 + (chunk ^ (row % 8)) * 16, words);
    fence_proxy_async_shared();
    barrier_sync_block();
    const float* c = p.c + i * 64 * 64;
    float d[32];
    for (int e = 0; e < 32; ++e) {
      d[e] = ld_global_float(c + (16 * warp + g + 8 * (e / 2 % 2)) * 64 + e / 4 * 8 + 2 * t + e % 2);
    }
    const int first = 16 * warp + g;
    const uint32_t a0 = pair(a, 16, first, 2 * t), a1 = pair(a, 16, first + 8, 2 * t);
    const uint32_t a2 = pair(a, 16, first, 2 * t + 8), a3 = pair(a, 16, first + 8, 2 * t + 8);
    wgmma_fence_operands(d);
    wgmma_fence();
    wgmma_rs<Element, 64, false>(d, a0, a1, a2, a3, make_smem_descriptor(smem, 0, 1024), 1);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operands(d);
    float* out = p.d + i * 64 * 64;
    for (int e = 0; e < 32; ++e) {
      st_global_float(out + (16 * warp + g + 8 * (e / 2 % 2)) * 64 + e / 4 * 8 + 2 * t + e % 2, d[e]);
    }
    barrier_sync_block();
  }
}

// d[i] = f(c[i]): 0 exp2, 1 lg2, 2 rcp.
template <int kFunction>
__device__ inline void function(const Params& p) {
  for (int i = block_index() * block_size() + thread_index(); i < p.count; i += grid_size() * block_size()) {
    const float x = ld_global_float(p.c + i);
    st_global_float(p.d + i, kFunction == 0 ? exp2_approx(x) : kFunction == 1 ? lg2_approx(x) : rcp_approx(x));
  }
}

}  // namespace probe

#define PROBE(name, threads, call)                                                                           \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ probe::Params params) { \
    call(params);                                                                                            \
  }
PROBE(probe_mma_f16, 32, (probe::multiply<flashmoe::ptx::F16, 16>))
PROBE(probe_mma_bf16, 32, (probe::multiply<flashmoe::ptx::BF16, 16>))
PROBE(probe_mma_k8_f16, 32, (probe::multiply<flashmoe::ptx::F16, 8>))
PROBE(probe_wgmma_f16, 128, (probe::warpgroup_multiply<flashmoe::ptx::F16>))
PROBE(probe_wgmma_bf16, 128, (probe::warpgroup_multiply<flashmoe::ptx::BF16>))
PROBE(probe_exp2, 128, (probe::function<0>))
PROBE(probe_lg2, 128, (probe::function<1>))
PROBE(probe_rcp, 128, (probe::function<2>))
