// Small kernels that use every emulated instruction once, correctly if fault is 0 and in a different wrong way for
// every other number. Like the project's kernels, they access memory only through csrc/ptx.
#pragma once

#include "ptx/atomics.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/register_control.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace machine_test {

using namespace flashmoe::ptx;

struct Params {
  const unsigned char* in;
  unsigned char* out;
  int32_t* counter;
  int fault;
  int size;
};

// ---- one warp or more, generic accesses ----------------------------------------------------------------------------
// out[i] = in[i] + 1 for `size` words, by way of shared memory, read by the neighbouring thread.
__device__ inline void exchange(const Params& p) {
  unsigned char* smem = dynamic_shared_memory();
  const int thread = thread_index();
  const int neighbour = (thread + 37) % block_size();
  const unsigned char* in = p.in + 4 * (block_index() * block_size() + neighbour);
  if (p.fault == 1) in += 4 * p.size;  // past the end of the input
  if (p.fault == 2) in += 2;           // not a multiple of 4
  uint32_t value = ld_global_32(in);
  if (p.fault == 3) value += *reinterpret_cast<const uint32_t*>(in);        // global memory without a wrapper
  if (p.fault == 4) value += *reinterpret_cast<const uint32_t*>(smem + 4);  // shared memory without a wrapper
  int store_at = 4 * neighbour;
  const int steps[2] = {0, 4};
  if (p.fault == 12) store_at += 4 * (thread / (p.size - 128));  // division by zero
  if (p.fault == 13) store_at += steps[p.size / 32];             // past the end of a register array
  if (p.fault == 14) store_at += (p.size + 0x7fffffff) % 4 * 4;  // more than an int holds
  if (p.fault == 5) store_at += 4 * block_size();                // past the end of shared memory
  if (p.fault == 6) store_at = 4 * (neighbour & ~1);             // two threads write one word
  if (p.fault != 7) st_shared_32(smem + store_at, value);
  if (p.fault != 8) barrier_sync_block();
  value = ld_shared_32(smem + 4 * thread);
  unsigned char* out = p.out + 4 * (block_index() * block_size() + thread);
  if (p.fault == 9) out = p.out + 4 * thread;  // all blocks write the same words
  if (p.fault == 10) out = const_cast<unsigned char*>(p.in);
  if (p.fault == 11) value += ld_global_32(p.out + 4 * (block_index() * block_size() + thread));  // nothing wrote it
  st_global_32(out, value + 1);
}

// Inside one warp: 16 bytes per lane to shared memory, another lane's back; only a warp barrier orders them.
__device__ inline void warp_exchange(const Params& p) {
  unsigned char* smem = dynamic_shared_memory();
  const int lane = lane_index();
  uint32_t value[4];
  ld_global_128(value, p.in + 16 * lane);
  st_shared_128(smem + 16 * lane, value);
  if (p.fault == 1 && lane >= 16) return;             // half of the warp leaves before a collective
  if (p.fault == 2 && lane < 16) shuffle_xor(1u, 1);  // half of the warp shuffles, the other half does not
  if (p.fault != 3) warp_sync();
  ld_shared_128(value, smem + 16 * (lane ^ 5));
  if (p.fault != 4) warp_sync();  // write after read
  st_shared_128(smem + 16 * lane, value);
  warp_sync();
  ld_shared_128(value, smem + 16 * (lane ^ 3));
  st_global_128(p.out + 16 * lane, value);
}

// out[lane] = sum over the warp; out[32 + lane]: votes, an elected lane's count and an indexed shuffle.
__device__ inline void collectives(const Params& p) {
  const int lane = lane_index();
  float sum = static_cast<float>(lane);
  for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  st_global_float(reinterpret_cast<float*>(p.out) + lane, sum);
  const int any = vote_any(lane == 7) ? 1 : 0, all = vote_all(lane < 31) ? 2 : 0;
  const bool elected = elect_one();
  if (elected) atomic_add_global(p.counter, 1);
  const int from = shuffle_index(lane * 3, 5);
  st_global_32(p.out + 4 * (32 + lane), static_cast<uint32_t>(any + all + from));
}

// out[lane]: the lanes with lane % 5 == 2; out[32 + lane]: the largest number, which lane 9 has, plus its number of set
// bits; out[64 + lane]: the sum of lane - 20.
__device__ inline void matches(const Params& p) {
  const int lane = lane_index();
  st_global_32(p.out + 4 * lane, vote_ballot(lane % 5 == 2));
  const uint32_t largest = reduce_max(lane == 9 ? 0xf0000001u : static_cast<uint32_t>(lane));
  st_global_32(p.out + 4 * (32 + lane), largest + static_cast<uint32_t>(population_count(largest)));
  st_global_32(p.out + 4 * (64 + lane), static_cast<uint32_t>(reduce_add(lane - 20)));
}

// ---- cp.async ------------------------------------------------------------------------------------------------------
// Copies `size` tiles of 16 bytes per thread through a ring of two buffers; half of the last 16 bytes are zeros.
__device__ inline void copy_ring(const Params& p) {
  unsigned char* smem = dynamic_shared_memory();
  const int tile_bytes = 16 * block_size(), thread = thread_index(), tiles = p.size;
  const auto load = [&](int tile) {
    const int at = tile % 2 * tile_bytes + 16 * thread;
    const bool is_last = tile == tiles - 1 && thread == block_size() - 1;
    const int source_bytes = p.fault == 5 ? 16 : is_last ? 8 : 16;
    cp_async_16(smem + at + (p.fault == 4 ? 8 : 0), p.in + tile * tile_bytes + 16 * thread, source_bytes);
  };
  load(0);
  cp_async_commit();
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) load(tile + 1);
    if (p.fault != 3 || tile % 2) cp_async_commit();
    if (p.fault != 1) cp_async_wait<1>();
    if (p.fault != 2) barrier_sync_block();
    uint32_t value[4];
    ld_shared_128(value, smem + tile % 2 * tile_bytes + 16 * (block_size() - 1 - thread));
    st_global_128(p.out + tile * tile_bytes + 16 * (block_size() - 1 - thread), value);
    if (p.fault != 6) barrier_sync_block();  // the buffer is loaded again in the next round
  }
}

// Two tiles of 16 bytes per thread from warp 0, which arrives once they are complete, to warp 1.
__device__ inline void copy_arrivals(const Params& p) {
  unsigned char* smem = dynamic_shared_memory();
  Mbarrier* full = reinterpret_cast<Mbarrier*>(smem + 1024);
  const int lane = lane_index();
  if (thread_index() == 0) {
    mbarrier_init(full, p.fault == 3 ? 31 : 32);
    mbarrier_init_fence();
  }
  barrier_sync_block();
  if (warp_index() == 0) {
    cp_async_16(smem + 16 * lane, p.in + 16 * lane);
    if (p.fault != 4) cp_async_16(smem + 512 + 16 * lane, p.in + 512 + 16 * lane);
    p.fault == 2 ? mbarrier_arrive(full) : mbarrier_arrive_cp_async(full);
    if (p.fault == 4) cp_async_16(smem + 512 + 16 * lane, p.in + 512 + 16 * lane);
  } else {
    if (p.fault != 1) mbarrier_wait(full, 0);
    for (int tile = 0; tile < 1024; tile += 512) {
      uint32_t value[4];
      ld_shared_128(value, smem + tile + 16 * (31 - lane));
      st_global_128(p.out + tile + 16 * (31 - lane), value);
    }
  }
}

// ---- mma -----------------------------------------------------------------------------------------------------------
// d[16][8] = a[16][16] b[16][8] (b stored as [16][8]) by ldmatrix and mma; fault 9 uses m16n8k8 twice.
template <typename Element>
__device__ inline void warp_product(const Params& p) {
  unsigned char* smem = dynamic_shared_memory();
  const int lane = lane_index();
  uint32_t value[4];
  ld_global_128(value, p.in + 16 * lane);
  st_shared_128(smem + 16 * lane, value);  // a: 512 bytes
  if (lane < 16) {
    ld_global_128(value, p.in + 512 + 16 * lane);
    st_shared_128(smem + 512 + 16 * lane, value);  // b: 256 bytes
  }
  warp_sync();
  uint32_t a[4], b[2];
  ldmatrix_x4(a, smem + 32 * (lane % 16) + 16 * (lane / 16) + (p.fault == 1 ? 8 : 0));
  ldmatrix_x2_trans(b, smem + 512 + 16 * (lane % 16));
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if constexpr (sizeof(Element) == 2 && ElementFormat<Element>::kFormat == flashmoe::emulation::Format::kF16) {
    if (p.fault == 9) {
      mma_m16n8k8<Element>(d, a[0], a[1], b[0]);
      mma_m16n8k8<Element>(d, a[2], a[3], b[1]);
    } else {
      mma_m16n8k16<Element>(d, a, b[0], b[1]);
    }
  } else {
    mma_m16n8k16<Element>(d, a, b[0], b[1]);
  }
  float* out = reinterpret_cast<float*>(p.out);
  for (int i = 0; i < 4; ++i) st_global_float(out + (lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2, d[i]);
}

// ---- barriers ------------------------------------------------------------------------------------------------------
// Warp 0 writes, warp 1 reads, over named barriers 1 (full) and 2 (empty), `size` rounds.
__device__ inline void named_barriers(const Params& p) {
  unsigned char* smem = dynamic_shared_memory();
  const int lane = lane_index();
  for (int round = 0; round < p.size; ++round) {
    if (warp_index() == 0) {
      if (round > 0 && p.fault != 1) named_barrier_sync(2, 64);
      st_shared_32(smem + 4 * lane, static_cast<uint32_t>(round * 100 + lane));
      if (p.fault == 2)
        named_barrier_arrive(1, 96);
      else
        named_barrier_arrive(p.fault == 5 ? 17 : 1, p.fault == 3 ? 40 : 64);
    } else {
      named_barrier_sync(1, 64);
      const uint32_t value = ld_shared_32(smem + 4 * (31 - lane));
      st_global_32(p.out + 4 * (32 * round + 31 - lane), value);
      if (round + 1 < p.size && p.fault != 4) named_barrier_arrive(2, 64);
    }
  }
}

// Warp 0 writes, all four warps meet, warp 2 reads. With fault 1 warps 0 and 1 meet, and later (after a relaxed atomic)
// warps 2 and 3 at the same barrier: that tells warp 2 nothing about what warp 0 wrote.
__device__ inline void barrier_rounds(const Params& p) {
  unsigned char* smem = dynamic_shared_memory();
  const int lane = lane_index();
  if (warp_index() == 0) st_shared_32(smem + 4 * lane, static_cast<uint32_t>(lane + 1));
  if (p.fault == 1 && warp_index() >= 2) {
    while (atomic_add_global(p.counter, 0) == 0) {
    }
  }
  named_barrier_sync(1, p.fault == 1 ? 64 : 128);
  if (warp_index() == 1 && lane == 0) atomic_add_global(p.counter, 1);
  if (warp_index() == 2) st_global_32(p.out + 4 * lane, ld_shared_32(smem + 4 * (31 - lane)));
}

// One thread fills, a warp empties, `size` rounds, with only mbarriers. One lane arrives for its warp, so the others'
// waits must come before.
__device__ inline void phases(const Params& p) {
  Mbarrier* full = reinterpret_cast<Mbarrier*>(dynamic_shared_memory());
  Mbarrier* empty = full + 1;
  if (thread_index() == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, 1);
  }
  barrier_sync_block();
  for (int round = 0; round < p.size; ++round) {
    if (warp_index() == 0) {
      if (lane_index() != 0) return;
      mbarrier_wait(empty, round % 2 ^ 1);
      mbarrier_arrive(full);
    } else {
      mbarrier_wait(full, round % 2);
      if (p.fault != 1) warp_sync();
      if (p.fault == 2) shuffle_xor(1u, 1);
      if (lane_index() == 0) mbarrier_arrive(empty);
    }
  }
  if (warp_index() == 1) st_global_32(p.out + 4 * lane_index(), 1);
}

__device__ inline void registers(const Params& p) {
  if (warp_index() / 4 == 0) {
    if (p.fault != 1) setmaxnreg_dec<24>();
    if (p.fault == 2 && warp_index() == 0) setmaxnreg_inc<40>();
  } else {
    if (p.fault == 3) setmaxnreg_inc<24>();
    setmaxnreg_inc<232>();
  }
  barrier_sync_block();
  if (thread_index() == 0) st_global_32(p.out, 1);
}

// A dependent launch, whose input the preceding grid writes. Each thread that touches it waits.
__device__ inline void dependent(const Params& p) {
  if (p.fault != 1 && (p.fault != 2 || lane_index() != 9)) grid_dependency_wait();
  st_global_32(p.out + 4 * thread_index(), ld_global_32(p.in + 4 * thread_index()));
}

// Blocks draw numbers from a counter, as a persistent kernel does.
__device__ inline void draw(const Params& p) {
  if (thread_index() != 0) return;
  while (true) {
    const int drawn = atomic_add_global(p.counter, 1);
    if (p.fault != 1 && drawn >= p.size) break;
    if (p.fault == 1) continue;  // no end
    st_global_32(p.out + 4 * drawn, static_cast<uint32_t>(drawn + 1));
  }
}

// ---- TMA and wgmma -------------------------------------------------------------------------------------------------
// out[64][64] = sum over `size` tiles of A_t[64][64] B_t[64][64]: warpgroup 0 loads A and B by TMA into a ring of two
// stages, warpgroup 1 multiplies, and stores by stmatrix and TMA. B is [k][n] ("transposed" for wgmma).
struct PipelineParams {
  int fault;
  int size;
};

constexpr int kStageBytes = 2 * 64 * 128;
constexpr int kOutputOffset = 2 * kStageBytes;
constexpr int kBarrierOffset = kOutputOffset + 64 * 128;
constexpr int kPipelineBytes = kBarrierOffset + 5 * 8 + 24;

__device__ inline void produce(const PipelineParams& p, unsigned char* smem, Mbarrier* full, Mbarrier* empty,
                               const TensorMap* a_map, const TensorMap* b_map) {
  if (warp_index() != 0 || !elect_one()) return;
  for (int tile = 0; tile < p.size; ++tile) {
    const int stage = tile % 2;
    const int parity = tile / 2 % 2;
    if (p.fault != 1) mbarrier_wait(empty + stage, parity ^ 1 ^ (p.fault == 2 ? 1 : 0));
    const int bytes = p.fault == 3 ? kStageBytes / 2 : p.fault == 4 ? kStageBytes + 16 : kStageBytes;
    mbarrier_arrive_expect_tx(full + stage, bytes);
    unsigned char* a = smem + stage * kStageBytes;
    tma_load_4d(a + (p.fault == 5 ? 512 : 0), a_map, full + stage, 64 * tile, 0, 0, 0, CacheHint::kEvictFirst);
    tma_load_4d(a + kStageBytes / 2, b_map, full + stage, 0, 64 * tile, 0, 0, CacheHint::kEvictLast);
    if (p.fault == 6) break;  // the consumers wait for more
  }
}

template <typename Element, bool kFromRegisters>
__device__ inline void consume(const PipelineParams& p, unsigned char* smem, Mbarrier* full, Mbarrier* empty,
                               const TensorMap* out_map) {
  float d[32];
  const int lane = lane_index(), warp = warp_index() % 4;
  for (int i = 0; i < 32; ++i) d[i] = 0.0f;
  for (int tile = 0; tile < p.size; ++tile) {
    const int stage = tile % 2;
    unsigned char* a_smem = smem + stage * kStageBytes;
    if (p.fault != 7) mbarrier_wait(full + stage, tile / 2 % 2);
    uint32_t a[4][4];
    if constexpr (kFromRegisters) {
      for (int step = 0; step < 4; ++step) {
        const int row = warp * 16 + lane % 16, chunk = step * 2 + lane / 16;
        ldmatrix_x4(a[step], a_smem + row * 128 + (chunk ^ (row % 8)) * 16);
      }
    }
    if (p.fault != 8) wgmma_fence();
    const uint64_t a_descriptor = make_smem_descriptor(a_smem, 0, p.fault == 9 ? 512 : 1024);
    const uint64_t b_descriptor = make_smem_descriptor(a_smem + kStageBytes / 2, 64 * 128, 1024);
    for (int step = 0; step < 4; ++step) {
      const uint64_t b = advance_smem_descriptor(b_descriptor, step * (p.fault == 10 ? 4096 : 2048));
      if constexpr (kFromRegisters) {
        wgmma_rs<Element, 64, true>(d, a[step][0], a[step][1], a[step][2], a[step][3], b, 1);
      } else {
        wgmma_ss<Element, 64, true>(d, advance_smem_descriptor(a_descriptor, step * 32), b, 1);
      }
    }
    wgmma_commit();
    if (p.fault == 11) d[3] *= 2.0f;  // touched while in flight
    if (p.fault == 25) a[2][1] ^= 1;  // A in registers, too
    if (p.fault == 12) {
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    wgmma_fence_operands(d);
    if (kFromRegisters) warp_sync();                             // lane 0 arrives for what all lanes read by ldmatrix
    if (lane == 0 && p.fault >= 26) (void)ld_shared_32(a_smem);  // nothing uses its value
    if (p.fault == 27) fence_proxy_async_shared();
    if (lane == 0 && p.fault != 13) mbarrier_arrive(empty + stage);
    if (lane == 0 && p.fault == 14) mbarrier_arrive(empty + stage);
  }
  if (p.fault == 15 && warp == 3) wgmma_wait<0>();  // harmless: a wait without products
  unsigned char* out_smem = smem + kOutputOffset;
  for (int step = 0; step < 4; ++step) {
    const int row = warp * 16 + lane % 16, chunk = step * 2 + lane / 16;
    const float* e = d + 8 * step;
    const uint32_t words[4] = {pack<Element>(e[0], e[1]), pack<Element>(e[2], e[3]), pack<Element>(e[4], e[5]),
                               pack<Element>(e[6], e[7])};
    const int place = p.fault == 16 ? chunk : chunk ^ (row % 8);
    stmatrix_x4(out_smem + row * 128 + place * 16, words);
  }
  if (p.fault != 17) fence_proxy_async_shared();
  if (p.fault != 18) named_barrier_sync(1, 128);
  if (warp == 0 && lane == 0) {
    tma_store_4d(out_map, out_smem, 0, 0, 0, 0);
    tma_store_commit();
    if (p.fault != 19) tma_store_wait_read<0>();
  }
}

template <typename Element, bool kFromRegisters>
__device__ inline void pipeline(const PipelineParams& p, const TensorMap& a_map, const TensorMap& b_map,
                                const TensorMap& out_map) {
  unsigned char* smem = dynamic_shared_memory();
  Mbarrier* full = reinterpret_cast<Mbarrier*>(smem + kBarrierOffset);
  Mbarrier* empty = full + 2;
  if (thread_index() == 0) {
    prefetch_tensor_map(&a_map);
    for (int stage = 0; stage < 2; ++stage) {
      if (p.fault != 20) mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, 4);
    }
    if (p.fault == 21) mbarrier_init(empty, 4);
    if (p.fault != 22) mbarrier_init_fence();
  }
  if (p.fault != 23) barrier_sync_block();
  if (p.fault == 24 && thread_index() == 1) st_shared_32(smem + kBarrierOffset, 0);
  if (warp_index() / 4 == 0) {
    produce(p, smem, full, empty, &a_map, &b_map);
  } else {
    consume<Element, kFromRegisters>(p, smem, full, empty, &out_map);
  }
}

}  // namespace machine_test

#define MACHINE_TEST(name, call)                                                            \
  extern "C" void emulation_entry_##name(const void* const* arguments) {                    \
    const machine_test::Params p = *static_cast<const machine_test::Params*>(arguments[0]); \
    call;                                                                                   \
  }
#define PIPELINE_TEST(name, element, from_registers)                                                                   \
  extern "C" void emulation_entry_##name(const void* const* arguments) {                                               \
    using flashmoe::ptx::TensorMap;                                                                                    \
    machine_test::pipeline<element, from_registers>(                                                                   \
        *static_cast<const machine_test::PipelineParams*>(arguments[0]), *static_cast<const TensorMap*>(arguments[1]), \
        *static_cast<const TensorMap*>(arguments[2]), *static_cast<const TensorMap*>(arguments[3]));                   \
  }

MACHINE_TEST(exchange, machine_test::exchange(p))
MACHINE_TEST(warp_exchange, machine_test::warp_exchange(p))
MACHINE_TEST(collectives, machine_test::collectives(p))
MACHINE_TEST(matches, machine_test::matches(p))
MACHINE_TEST(copy_ring, machine_test::copy_ring(p))
MACHINE_TEST(copy_arrivals, machine_test::copy_arrivals(p))
MACHINE_TEST(product_f16, machine_test::warp_product<flashmoe::ptx::F16>(p))
MACHINE_TEST(product_bf16, machine_test::warp_product<flashmoe::ptx::BF16>(p))
MACHINE_TEST(named_barriers, machine_test::named_barriers(p))
MACHINE_TEST(barrier_rounds, machine_test::barrier_rounds(p))
MACHINE_TEST(phases, machine_test::phases(p))
MACHINE_TEST(registers, machine_test::registers(p))
MACHINE_TEST(dependent, machine_test::dependent(p))
MACHINE_TEST(draw, machine_test::draw(p))
PIPELINE_TEST(pipeline_f16, flashmoe::ptx::F16, false)
PIPELINE_TEST(pipeline_bf16_registers, flashmoe::ptx::BF16, true)
