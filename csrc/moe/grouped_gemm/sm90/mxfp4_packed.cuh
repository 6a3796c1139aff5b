// Grouped products of 16-bit rows with 4-bit weights packed for this kernel (params/mxfp4.h), plain and gated, for
// sm_90a. The result is computed transposed: a consumer's 64 weight rows are the M side of wgmma, whose A comes from
// registers, so the bf16 weights that a thread makes from its codes never pass through shared memory. Rows of a are N,
// as many as the expert has: 8 to kBlockM.
//
// A product is in flight while the codes of the next 64 k are converted: two sets of A registers alternate. The sum
// over k is one chain of products of 16 k each, in ascending order, as in mainloop.cuh: the same bits.
#pragma once

#include "device/shared_tile.cuh"
#include "moe/grouped_gemm/activation.cuh"
#include "moe/grouped_gemm/mxfp4.cuh"
#include "moe/grouped_gemm/sm90/producer.cuh"
#include "moe/params/mxfp4.h"
#include "ptx/bf16x2.cuh"
#include "ptx/convert.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/register_control.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe::moe::sm90 {

// kBlockM: rows of a; kBlockN: weight rows, 64 per consumer warpgroup. Names are those of TileSpec where they mean the
// same.
template <typename Element_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_, bool kIsGated_>
struct PackedSpec {
  using Element = Element_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kBlockK = kMxfp4PackedK;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr bool kIsGated = kIsGated_;
  static constexpr bool kGathersA = kIsGated && packed_gathers(kBlockM);

  static constexpr int kNumConsumers = kBlockN / kMxfp4PackedRows;
  static constexpr int kProducerWarps = kGathersA ? 4 : 1;
  static constexpr int kOutputColumns = kIsGated ? kBlockN / 2 : kBlockN;
  static constexpr int kNumTileSlots = 2;
  static constexpr int kFullArrivals = kGathersA ? 1 + 32 * kProducerWarps : 1;
  static_assert(kNumConsumers == 2 || kNumConsumers == 3 || kNumConsumers == 5 || kNumConsumers == 6,
                "registers are shared out for these");
  static_assert(kNumWarps == 4 * (kNumConsumers + 1), "one producer warpgroup and the consumers");
  static_assert(kBlockM % 16 == 0 && kBlockM <= (kNumConsumers == 2   ? 256
                                                 : kNumConsumers == 3 ? 128
                                                                      : 16),
                "sums are kBlockM / 2 registers");

  // Redistributes the registers that the threads start with: 384 threads with 168 each, 512 with 128, 768 with 80 or
  // 896 with 72.
  static constexpr int kProducerRegisters = kNumConsumers == 3 ? 56 : 40;
  static constexpr int kConsumerRegisters = kNumConsumers == 2   ? 232
                                            : kNumConsumers == 3 ? 152
                                            : kNumConsumers == 5 ? 88
                                                                 : 72;

  using ATile = SharedTile<kBlockM, kBlockK>;
  static constexpr int kBoxRows = packed_box_rows(kBlockM);  // per copy, of rows that are not gathered
  static constexpr int kBoxBytes = kBoxRows * kSlabRowBytes;
  static constexpr int kABytes = ATile::kBytes;
  static constexpr int kCodesBytes = kNumConsumers * kMxfp4PackedLines * kSlabRowBytes;  // that arrive
  static constexpr int kBBytes = (kCodesBytes + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
  // Staging of results: 32 rows of a warp's own columns; wider rows have 16 bytes of padding, for different banks.
  static constexpr int kWarpColumns = kIsGated ? 8 : 16;
  static constexpr int kPitch = kIsGated ? 16 : 48;  // bytes
  static constexpr int kWarpBytes = 32 * kPitch;

  static constexpr int kAOffset = 0;
  static constexpr int kBOffset = kNumStages * kABytes;
  static constexpr int kOutputOffset = kBOffset + kNumStages * kBBytes;
  static constexpr int kTileOffset = kOutputOffset + 4 * kNumConsumers * kWarpBytes;
  static constexpr int kBarrierOffset = kTileOffset + kNumTileSlots * 16;
  static constexpr int kSharedBytes = kBarrierOffset + 2 * (kNumStages + kNumTileSlots) * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// Widths of the product: how many rows of a it takes. Returns the next one after `width`.
template <typename Spec>
__device__ __forceinline__ constexpr int next_width(int width) {
  return width < 64 || Spec::kBlockM == 256 ? 2 * width : width + 32;
}
template <typename Spec>
constexpr int kLeastWidth = Spec::kBlockM <= 32 ? 8 : 32;

// The smallest width that holds a tile's rows.
template <typename Spec>
__device__ __forceinline__ int width_for(const Tile& tile) {
  int width = kLeastWidth<Spec>;
  while (width < Spec::kBlockM && tile.end_row - tile.first_row > width) width = next_width<Spec>(width);
  return width;
}

template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps>
using PackedGemmSpec = PackedSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, false>;
template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps>
using PackedGatedGemmSpec = PackedSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, true>;

// The work of each producer warp for a tile: codes and scales by TMA; rows of a by TMA in boxes, or gathered.
template <typename Spec>
struct PackedLoads {
  const GemmParams& params;
  const SharedMemory<Spec> smem;
  const ptx::TensorMap* a_map;  // null if rows are gathered
  const ptx::TensorMap& b_map;
  RingPosition<Spec::kNumStages> state;

  __device__ __forceinline__ void operator()(const Tile& tile, int warp) {
    const int lane = ptx::lane_index();
    const int eights = width_for<Spec>(tile) / 8;  // what is past the expert's rows is never stored
    const int boxes = ceil_div(eights, Spec::kBoxRows / 8);
    GatheredRows<Spec> rows;
    if constexpr (Spec::kGathersA) rows.find(params, tile);
    for (int k = 0; k < params.k; k += Spec::kBlockK, state.advance()) {
      ptx::Mbarrier* full = smem.full(state.stage);
      ptx::mbarrier_wait(smem.empty(state.stage), state.parity ^ 1);
      if (warp == 0) {
        ptx::warp_sync();  // every lane has seen the stage empty before it can be empty again
        if (lane == 0) {
          ptx::mbarrier_arrive_expect_tx(full, Spec::kCodesBytes + (Spec::kGathersA ? 0 : boxes * Spec::kBoxBytes));
          ptx::tma_load_4d(smem.b(state.stage), &b_map, full, 0, k / Spec::kBlockK * kMxfp4PackedLines,
                           tile.n_block * Spec::kNumConsumers, tile.expert, ptx::CacheHint::kEvictFirst);
        }
        if constexpr (!Spec::kGathersA) {
          ptx::warp_sync();  // the bytes are expected before they arrive
          if (lane < boxes) {
            ptx::tma_load_4d(smem.a(state.stage) + lane * Spec::kBoxBytes, a_map, full, k,
                             tile.first_row + lane * Spec::kBoxRows, 0, 0, ptx::CacheHint::kEvictNormal);
          }
        }
      }
      if constexpr (Spec::kGathersA) {
        rows.copy(params, smem.a(state.stage), k, 8 * eights);
        ptx::mbarrier_arrive_cp_async(full);
      }
    }
  }
};

// Addresses of a consumer thread's codes and scales in a stage.
struct PackedAddresses {
  ptx::SmemPointer codes;   // in stage 0, four words
  ptx::SmemPointer scales;  // one word

  __device__ __forceinline__ PackedAddresses(ptx::SmemPointer b_smem, int consumer)
      : codes(b_smem + byte_offset(consumer, ptx::thread_index() % 128 * 16)),
        scales(b_smem + byte_offset(consumer, kMxfp4PackedCodes + ptx::thread_index() % 128 / 4 * 4)) {}

  // Offset of a byte of a block, as TMA swizzles it.
  static __device__ __forceinline__ int byte_offset(int consumer, int byte) {
    const int line = consumer * kMxfp4PackedLines + byte / kSlabRowBytes, within = byte % kSlabRowBytes;
    return line * kSlabRowBytes + (within / 16 ^ line % 8) * 16 + within % 16;
  }
};

// A thread's 32 weights of a block as A of four products, [k step][register]. scales: one byte each, of its two rows'
// first 32 k, then of their second 32.
__device__ __forceinline__ void convert_packed(uint32_t (&a)[16], const uint32_t (&words)[4], uint32_t scales) {
  const bool is_large = ptx::vote_ballot(has_large_scale(scales)) != 0;
  uint32_t first = scales;
  if (is_large) first = smaller_scales(scales);
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    uint32_t pairs[8];
    spread_packed(pairs, words[2 * block], words[2 * block + 1]);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const Mxfp4Scale<false> scale(scale_byte(first, 2 * block + row));
#pragma unroll
      for (int i = 0; i < 4; ++i) a[8 * block + 2 * i + row] = scale.apply(pairs[2 * i + row]);
    }
  }
  if (is_large) {
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      const uint32_t rest = rest_of_scale(scale_byte(scales, byte));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t& weights = a[8 * (byte / 2) + 2 * i + byte % 2];
        weights = ptx::multiply_bf16x2(weights, rest);
      }
    }
  }
}

template <typename Spec>
struct PackedConsumer {
  const GemmParams& params;
  const SharedMemory<Spec> smem;
  const int consumer;
  const PackedAddresses addresses;
  RingPosition<Spec::kNumStages> state;

  __device__ __forceinline__ PackedConsumer(const GemmParams& params_, const SharedMemory<Spec>& smem_, int consumer_)
      : params(params_), smem(smem_), consumer(consumer_), addresses(ptx::SmemPointer(smem_.b(0)), consumer_) {}

  // One arrival per warp, after its own wgmma_wait.
  __device__ __forceinline__ void release(int stage) const {
    ptx::warp_sync();  // every lane has read its codes
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(smem.empty(stage));
  }

  // Converts the weights of the next stage.
  __device__ __forceinline__ void convert(uint32_t (&a)[16]) const {
    ptx::mbarrier_wait(smem.full(state.stage), state.parity);
    // For rows copied by cp.async. Here because it takes long, and the previous stage is still being multiplied.
    if constexpr (Spec::kGathersA) ptx::fence_proxy_async_shared();
    uint32_t words[4];
    ptx::ld_shared_128(words, addresses.codes + state.stage * Spec::kBBytes);
    convert_packed(a, words, ptx::ld_shared_32(addresses.scales + state.stage * Spec::kBBytes));
  }

  // Issues that stage's products, asynchronously.
  template <int kN>
  __device__ __forceinline__ void issue(float (&accum)[kN / 2], uint32_t (&a)[16], bool is_first) const {
    const auto rows = typename Spec::ATile{smem.a(state.stage)}.k_major();
    ptx::wgmma_fence_operands(a);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Spec::kBlockK / 16; ++step)
      ptx::wgmma_rs<typename Spec::Element, kN, false>(accum, a[4 * step], a[4 * step + 1], a[4 * step + 2],
                                                       a[4 * step + 3], rows.k_step(step),
                                                       step == 0 && is_first ? 0 : 1);
    ptx::wgmma_commit();
  }

  // While a stage is multiplied, the next one's codes are converted; the other consumers' products keep the tensor
  // cores busy in between.
  template <int kN>
  __device__ __forceinline__ void multiply(float (&accum)[kN / 2]) {
    const int blocks = ceil_div(params.k, Spec::kBlockK);
    uint32_t even[16], odd[16];
    bool is_first = true;
    const auto finish = [&](int stage) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(accum);
      release(stage);
    };
    const auto step = [&](uint32_t (&a)[16], uint32_t (&next)[16]) {
      issue<kN>(accum, a, is_first);
      is_first = false;
      const int stage = state.stage;
      state.advance();
      convert(next);
      finish(stage);
    };
    const auto last = [&](uint32_t (&a)[16]) {
      issue<kN>(accum, a, is_first);
      const int stage = state.stage;
      state.advance();
      finish(stage);
    };
    convert(even);
    int left = blocks;
    for (; left > 2; left -= 2) {
      step(even, odd);
      step(odd, even);
    }
    if (left == 2) {
      step(even, odd);
      last(odd);
    } else {
      last(even);
    }
  }

  // Lanes 4 apart have neighbouring columns of the same two rows, one word per row (two columns, 8 apart): each keeps
  // the row of its own parity and receives the other lane's word of that row. pairs: neighbouring columns, then those 8
  // further on.
  static __device__ __forceinline__ void exchange(uint32_t (&pairs)[2], uint32_t first, uint32_t second) {
    const bool is_odd = ptx::lane_index() / 4 % 2 != 0;
    const uint32_t kept = is_odd ? second : first;
    const uint32_t got = ptx::shuffle_xor(is_odd ? first : second, 4);
    const uint32_t left = is_odd ? got : kept, right = is_odd ? kept : got;
    pairs[0] = ptx::permute_bytes(left, right, 0x5410u);
    pairs[1] = ptx::permute_bytes(left, right, 0x7632u);
  }

  // Stores the sums of a warp's 16 weight rows by kN rows of a, as rows of d.
  template <int kN, typename Finish>
  __device__ __forceinline__ void store(const Tile& tile, float (&accum)[kN / 2], int first_column, Finish finish) {
    using Element = typename Spec::Element;
    const int lane = ptx::lane_index(), warp = ptx::warp_index() % 4;
    const ptx::SmemPointer warp_smem =
        ptx::SmemPointer(smem.base + Spec::kOutputOffset) + (4 * consumer + warp) * Spec::kWarpBytes;
    const ptx::SmemPointer lane_smem = warp_smem + (lane % 4 * 2 + lane / 4 % 2) * Spec::kPitch + lane / 8 * 4;
    constexpr int kChunks = Spec::kWarpColumns / 8;  // of 16 bytes, per row
    constexpr int kRows = kN < 32 ? kN : 32;         // at a time
    const int rows = minimum(tile.end_row - tile.first_row, kN);
    Element* const d = static_cast<Element*>(params.d) + tile.first_row * params.d_stride + first_column;
#pragma unroll
    for (int first = 0; first < kN; first += kRows) {
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
        uint32_t pairs[2];
        finish(pairs, accum + (first / 8 + i) * 4);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
          ptx::st_shared_32(lane_smem + (8 * i * Spec::kPitch + chunk * 16), pairs[chunk]);
      }
      ptx::warp_sync();  // all lanes' columns are written
#pragma unroll
      for (int item = 0; item < kRows * kChunks; item += 32) {
        const int row = (item + lane) / kChunks, chunk = (item + lane) % kChunks;
        if (row < kRows && first + row < rows) {
          uint32_t words[4];
          ptx::ld_shared_128(words, warp_smem + (row * Spec::kPitch + chunk * 16));
          ptx::st_global_128(d + (first + row) * params.d_stride + chunk * 8, words);
        }
      }
      ptx::warp_sync();  // all lanes have read them
    }
  }

  __device__ __forceinline__ float bias_at(int expert, int column) const {
    using Element = typename Spec::Element;
    if (params.bias == nullptr) return -0.0f;  // added to -0, it leaves -0
    const Element* bias = static_cast<const Element*>(params.bias) + static_cast<int64_t>(expert) * params.n + column;
    return ptx::unpack<Element>(ptx::ld_global_16(bias)).x;
  }

  // Computes a tile of at most kN rows.
  template <int kN>
  __device__ __forceinline__ void compute(const Tile& tile) {
    using Element = typename Spec::Element;
    float accum[kN / 2] =
        {};  // the first product ignores them; undefined, ptxas would move them beside products in flight
    multiply<kN>(accum);
    const int block = tile.n_block * Spec::kNumConsumers + consumer;
    if (block * kMxfp4PackedRows >= params.n) return;
    const int warp_column = (block * 4 + ptx::warp_index() % 4) * Spec::kWarpColumns;
    const int column = warp_column + ptx::lane_index() / 4;
    if constexpr (Spec::kIsGated) {
      const bool is_interleaved = params.is_interleaved != 0;
      const float gate = bias_at(tile.expert, is_interleaved ? 2 * column : column);
      const float up = bias_at(tile.expert, is_interleaved ? 2 * column + 1 : params.n / 2 + column);
      with_activation(params.activation, [&](auto activation) {
        store<kN>(tile, accum, warp_column, [&](uint32_t (&pairs)[2], const float* four) {
          const float first = activation.forward(four[0] + gate, four[2] + up);
          const float second = activation.forward(four[1] + gate, four[3] + up);
          exchange(pairs, ptx::pack<Element>(first, first), ptx::pack<Element>(second, second));
        });
      });
    } else {
      const float low = bias_at(tile.expert, column), high = bias_at(tile.expert, column + 8);
      store<kN>(tile, accum, warp_column, [&](uint32_t (&pairs)[2], const float* four) {
        exchange(pairs, ptx::pack<Element>(four[0] + low, four[2] + high),
                 ptx::pack<Element>(four[1] + low, four[3] + high));
      });
    }
  }

  // Computes the tile with width kN, or a larger one if it has more rows.
  template <int kN>
  __device__ __forceinline__ void choose(const Tile& tile) {
    if constexpr (kN < Spec::kBlockM) {
      if (tile.end_row - tile.first_row > kN) return choose<next_width<Spec>(kN)>(tile);
    }
    compute<kN>(tile);
  }

  __device__ __forceinline__ void run() {
    RingPosition<Spec::kNumTileSlots> tile_state;
    while (true) {
      const Tile tile = next_tile<Spec>(smem, tile_state);
      if (tile.expert < 0) break;
      choose<kLeastWidth<Spec>>(tile);
    }
  }
};

template <typename Spec>
__device__ __forceinline__ void run_packed(const GemmParams& params, const ptx::TensorMap* a_map,
                                           const ptx::TensorMap& b_map) {
  const SharedMemory<Spec> smem{ptx::dynamic_shared_memory()};
  const auto [warp, warpgroup] = start_block(smem, a_map, b_map);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    PackedLoads<Spec> loads{params, smem, a_map, b_map, {}};
    produce<Spec>(params, smem, warp, loads);
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    PackedConsumer<Spec>(params, smem, warpgroup - 1).run();
  }
}

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_mxfp4_packed(const Mxfp4GemmParams& params, const ptx::TensorMap& a_map,
                                                          const ptx::TensorMap& b_map) {
  run_packed<Spec>(params.gemm, &a_map, b_map);
}

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_gated_mxfp4_packed(const Mxfp4GemmParams& params,
                                                                const ptx::TensorMap& b_map,
                                                                const ptx::TensorMap& a_map) {
  run_packed<Spec>(params.gemm, &a_map, b_map);
}

}  // namespace flashmoe::moe::sm90
