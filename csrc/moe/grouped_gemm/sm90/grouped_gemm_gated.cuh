// z = a[token(row)] B_e (+ bias_e), d[row] = activation(z), preactivation[row] = z if requested, for sm_90a: as
// grouped_gemm.cuh, but the producer gathers the rows of A, and a tile's columns are those of gate and up.
//
// Which of a thread's accumulators are gate and up of one column: with nk and kn, 64s + i and 64s + 32 + i (the first 64
// of every 128 columns of B are gate); with kKnPairs, 2i and 2i + 1.
#pragma once

#include "moe/grouped_gemm/activation.cuh"
#include "moe/grouped_gemm/sm90/grouped_gemm.cuh"

namespace flashmoe::moe::sm90 {

// Writes gate and up of 32 neighbouring columns to a slab, interleaved to 64 columns: `gate` and `up` are their accumulators.
template <typename Element>
__device__ __forceinline__ void write_interleaved_slab(unsigned char* smem, const float* gate, const float* up) {
  const int lane = ptx::lane_index();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = ptx::warp_index() % 4 * 16 + lane / 4 + 8 * r;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * j + 2 * r;
      const uint32_t words[2] = {pack<Element>(gate[i], up[i]), pack<Element>(gate[i + 1], up[i + 1])};
      const int chunk = 2 * j + lane % 4 / 2;
      ptx::st_shared_64(smem + row * 128 + (chunk ^ row % 8) * 16 + lane % 2 * 8, words);
    }
  }
}

// Writes 64 columns to a slab. This thread has column 4j + lane % 4 in accumulators 4j + 2r; lanes pair up, so that
// each has two neighbouring columns.
template <typename Element>
__device__ __forceinline__ void write_paired_slab(unsigned char* smem, const float* accum) {
  const int lane = ptx::lane_index();
  const bool is_odd = lane % 2 != 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = ptx::warp_index() % 4 * 16 + lane / 4 + 8 * r;
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
      const float first = accum[8 * chunk + 2 * r], second = accum[8 * chunk + 4 + 2 * r];
      const float other = ptx::shuffle_xor(is_odd ? first : second, 1);
      const uint32_t pair = is_odd ? pack<Element>(other, second) : pack<Element>(first, other);
      const int word = lane % 2 * 2 + lane % 4 / 2;
      ptx::st_shared_32(smem + row * 128 + (chunk ^ row % 8) * 16 + word * 4, pair);
    }
  }
}

template <typename Spec, Weights kWeights>
struct GatedEpilogue {
  using Element = typename Spec::Element;
  static constexpr bool kIsPaired = kWeights == Weights::kKnPairs;
  const GemmParams& params;
  const ptx::TensorMap& d_map;
  const ptx::TensorMap& z_map;
  OutputSlabs<Spec> slabs;

  __device__ __forceinline__ GatedEpilogue(const GemmParams& params_, const SharedMemory<Spec>& smem, int consumer,
                                           const ptx::TensorMap& d_map_, const ptx::TensorMap& z_map_)
      : params(params_), d_map(d_map_), z_map(z_map_), slabs(smem, consumer) {}

  __device__ __forceinline__ int columns() const { return params.n / 2; }

  // Adds the expert's bias of gate and up when they are not neighbours in a thread.
  __device__ __forceinline__ void add_bias_of_halves(float* accum, const Element* bias, int column) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int gate_column = column + 8 * j + ptx::lane_index() % 4 * 2;
      uint32_t words[2] = {0, 0};  // gate, up of the two columns; interleaved: both of the first, both of the second
      if (gate_column < columns()) {
        if (params.is_interleaved != 0) {
          ptx::ld_global_64(words, bias + 2 * gate_column);
        } else {
          words[0] = ptx::ld_global_32(bias + gate_column);
          words[1] = ptx::ld_global_32(bias + columns() + gate_column);
        }
      }
      float2 gate = unpack<Element>(words[0]), up = unpack<Element>(words[1]);
      if (params.is_interleaved != 0) {
        const float first_up = gate.y;
        gate.y = up.x;
        up.x = first_up;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        accum[4 * j + 2 * r] += gate.x;
        accum[4 * j + 2 * r + 1] += gate.y;
        accum[32 + 4 * j + 2 * r] += up.x;
        accum[32 + 4 * j + 2 * r + 1] += up.y;
      }
    }
  }

  template <int kNumAccum>
  __device__ __forceinline__ void add_biases(const WarpgroupTile<Spec>& wg_tile, float (&accum)[kNumAccum]) const {
    const Element* bias = static_cast<const Element*>(params.bias) + static_cast<int64_t>(wg_tile.expert) * params.n;
    if constexpr (kIsPaired) {
      const int column = 2 * wg_tile.column + ptx::lane_index() % 4 * 2;
      add_bias(accum, bias + column, params.n - column);
    } else {
#pragma unroll
      for (int s = 0; s < kNumAccum / 64; ++s) add_bias_of_halves(accum + 64 * s, bias, wg_tile.column + 64 * s);
    }
  }

  // Two slabs per 64 columns of the result.
  template <int kNumAccum>
  __device__ __forceinline__ void store_preactivation(const WarpgroupTile<Spec>& wg_tile,
                                                      const float (&accum)[kNumAccum]) {
    const bool is_interleaved = kIsPaired || params.is_interleaved != 0;
#pragma unroll
    for (int s = 0; s < kNumAccum / 64; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* half_accum = accum + 64 * s + 32 * half;
        const int column = wg_tile.column + 64 * s + (is_interleaved ? 32 * half : 0);
        if (column >= columns()) break;
        unsigned char* smem = slabs.acquire();
        if (kIsPaired || !is_interleaved) {
          write_slab<Element>(smem, half_accum);
        } else {
          write_interleaved_slab<Element>(smem, accum + 64 * s + 16 * half, accum + 64 * s + 32 + 16 * half);
        }
        Element* z = static_cast<Element*>(params.preactivation);
        if (is_interleaved) {
          slabs.store(SlabTarget{z_map, z, params.n, params.n, 0}, wg_tile.row, wg_tile.rows, 2 * column);
        } else {
          slabs.store(SlabTarget{z_map, z + half * columns(), params.n, columns(), half}, wg_tile.row, wg_tile.rows,
                      column);
        }
      }
    }
  }

  // The activation replaces gate.
  template <int kNumAccum>
  __device__ __forceinline__ void activate(float (&accum)[kNumAccum]) const {
    with_activation(params.activation, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < kNumAccum / 2; ++i) {
        const int gate = kIsPaired ? 2 * i : i / 32 * 64 + i % 32;
        accum[gate] = activation.forward(accum[gate], accum[gate + (kIsPaired ? 1 : 32)]);
      }
    });
  }

  // Stores kSums columns of the result, in slabs of 64, from own.column on.
  template <int kNumAccum>
  __device__ __forceinline__ void store(const WarpgroupTile<Spec>& wg_tile, float (&accum)[kNumAccum]) {
    if (params.bias != nullptr) add_biases(wg_tile, accum);
    if (params.preactivation != nullptr) store_preactivation(wg_tile, accum);
    activate(accum);
    const SlabTarget to{d_map, params.d, params.d_stride, columns(), 0};
#pragma unroll
    for (int s = 0; s < kNumAccum / 64; ++s) {
      const int column = wg_tile.column + 64 * s;
      if (column >= columns()) break;
      unsigned char* smem = slabs.acquire();
      if constexpr (kIsPaired) {
        write_paired_slab<Element>(smem, accum + 64 * s);
      } else {
        write_slab<Element>(smem, accum + 64 * s);
      }
      slabs.store(to, wg_tile.row, wg_tile.rows, column);
    }
  }

  __device__ __forceinline__ void finish() const { slabs.finish(); }
};

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void grouped_gemm_gated(const GemmParams& params, const ptx::TensorMap& b_nk_map,
                                                   const ptx::TensorMap& b_kn_map, const ptx::TensorMap& d_map,
                                                   const ptx::TensorMap& preactivation_map) {
  run_grouped_gemm<Spec, kWeights, GatedEpilogue<Spec, kWeights>>(
      params, nullptr, kWeights == Weights::kNk ? b_nk_map : b_kn_map, d_map, preactivation_map);
}

}  // namespace flashmoe::moe::sm90
