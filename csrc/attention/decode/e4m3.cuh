// Decoding from a cache of 8-bit floats (e4m3): the kernel of decode.cuh, whose warps convert the codes (e4m3 bytes)
// that they read to 16-bit elements just before the products.
//
// Codes are converted exactly, and scales are applied in float32: those of K to the scores, those of V to the output,
// which is kept in units of the current page's scale. Products with powers of two are exact: with such scales every bit
// is that of the 16-bit kernel on the dequantised cache.
#pragma once

#include "attention/decode/decode.cuh"
#include "attention/params/e4m3.h"
#include "ptx/cp_async_word.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shuffle.cuh"

namespace flashmoe::attention::decode {

// kKeepsOrder   1: a product of 16 columns takes them in the tensor's order, for tensor cores that add eight products
//                  at a time.
//               0: in the order in which ldmatrix delivers bytes, for tensor cores that add sixteen at a time, where
//                  the order does not matter.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps,
          int kQueryInRegisters, int kKeepsOrder_>
struct E4m3DecodeSpec : DecodeSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kQueryInRegisters, 0> {
  using Base = DecodeSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kQueryInRegisters, 0>;
  using KeyTile = RowTile<ptx::E4M3, kHeadDim>;
  static constexpr bool kKeepsOrder = kKeepsOrder_ != 0;
  static constexpr bool kHasTwoLoops = false;
  static constexpr int kTileBytes = kWarpKeys * KeyTile::kRowBytes;  // of K, or of V
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kRingBytes = kNumStages * kStageBytes;
  static constexpr int kQueryOffset = kNumWarps * kRingBytes;
  static constexpr int kScaleBytes = kNumStages * 8;  // of one warp: K's and V's of each stage
  static constexpr int kScaleOffset =
      kNumWarps * (kRingBytes + Base::kQueryBytes + Base::kStateBytes) + Base::kArrivalBytes;
  static constexpr int kSharedBytes = kScaleOffset + kNumWarps * kScaleBytes;

  // Two blocks hold the even and the odd of 16 columns; this is their order after E4m3Loader::finish.
  static __device__ __forceinline__ int output_column(int block, int lane) {
    return block / 2 * 16 + lane * 4 + block % 2 * 2;
  }

  static_assert(kKeepsOrder || !ptx::kIsEither<Element>, "only bf16 queries become f16 (ByteQuery)");
  static_assert(kBlockM * Base::kOutputRowBytes <= kRingBytes, "a warp leaves its output in its ring");
};

template <typename Element>
constexpr bool kIsBF16 = false;
template <>
constexpr bool kIsBF16<ptx::BF16> = true;

// For bf16: the factor of P in sums of P V, a power of two. As f16, P is then exact from 2^-27 to 2^5
// (CodeValues::narrow).
template <typename Spec>
constexpr float kWeightUnit = !Spec::kKeepsOrder && kIsBF16<typename Spec::Element> ? 1024.0f : 1.0f;

// Number of tiles of a segment from which on converting Q costs less than it saves.
constexpr int kWorthwhileTiles = 16;

// For bf16: whether Q's operand is f16, Q times a power of two. Converting codes to f16 takes a quarter of the
// instructions.
template <typename Element>
struct NarrowQuery {
  static constexpr bool kMayBeNarrow = kIsBF16<Element>;

  bool is_narrow = false;
  float inverse_factor = 1.0f;  // 1 / that power

  // words: this lane's share of all of the item's words. The largest element of all rows is scaled to below 2^15. If no
  // element except zero is 2^-28 of it or less, all are normal f16 numbers, whose products are those of bf16.
  template <int kWords>
  __device__ __forceinline__ void narrow(uint32_t (&words)[kWords]) {
    int most = 0, least = 0xffff;  // magnitudes; of the least minus 1, so that zero does not count
#pragma unroll
    for (int i = 0; i < kWords; ++i)
#pragma unroll
      for (int shift = 0; shift < 32; shift += 16) {
        const int magnitude = static_cast<int>(words[i] >> shift & 0x7fffu);
        most = max(most, magnitude);
        least = min(least, (magnitude - 1) & 0xffff);
      }
    const uint32_t exponent = ptx::reduce_max(static_cast<uint32_t>(most)) >> 7;  // biased by 127
    const uint32_t least_exponent = (0x10000u - ptx::reduce_max(static_cast<uint32_t>(0xffff - least))) >> 7;
    constexpr uint32_t kRange = 28, kLargest = 127 + 14;
    is_narrow = exponent > kRange && exponent < 255 && least_exponent + kRange >= exponent;
    if (!is_narrow) return;
    const float factor = ptx::bits_float((127 + kLargest - exponent) << 23);
    inverse_factor = ptx::bits_float((127 + exponent - kLargest) << 23);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float2 pair = unpack<Element>(words[i]);
      words[i] = pack<ptx::F16>(pair.x * factor, pair.y * factor);
    }
  }
};

// Q as A operands in the order of K's bytes: lane c of a quad holds columns 4 c to 4 c + 3 of each 16.
template <typename Spec>
struct ByteQuery : NarrowQuery<typename Spec::Element> {
  using Element = typename Spec::Element;

  uint32_t Q_rmem[Spec::kHeadDim / 4];

  __device__ __forceinline__ static void copy(const ForwardParams&, const Element*, const Segment&, ptx::SmemPointer) {}

  __device__ __forceinline__ ByteQuery(const ForwardParams& params, const Element* Q_gmem, const Segment& segment,
                                       ptx::SmemPointer) {
    if (params.head_dim == Spec::kHeadDim) {  // a branch around each pair of loads would take longer than all of them
      load<true>(params, Q_gmem, segment);
    } else {
      load<false>(params, Q_gmem, segment);
    }
  }

  template <bool kIsWhole>
  __device__ __forceinline__ void load(const ForwardParams& params, const Element* Q_gmem, const Segment& segment) {
    const int lane = ptx::lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = min(segment.rows - 1, half * 8 + lane / 4);
      const Element* row_gmem = Q_gmem + query_row<Spec>(params, segment, index).offset(params.q_stride) + lane % 4 * 4;
#pragma unroll
      for (int k = 0; k < Spec::kHeadDim / 16; ++k) {
        // Two loads: a 64-bit load would put both words side by side, as in no operand, and every product would move
        // four registers.
        const bool is_there = kIsWhole || k * 16 + lane % 4 * 4 < params.head_dim;
        Q_rmem[4 * k + half] = is_there ? ptx::ld_global_32(row_gmem + k * 16) : 0;
        Q_rmem[4 * k + 2 + half] = is_there ? ptx::ld_global_32(row_gmem + k * 16 + 2) : 0;
      }
    }
  }

  __device__ __forceinline__ void prepare(const ForwardParams&, const Element*, const Segment& segment,
                                          ptx::SmemPointer) {
    if constexpr (ByteQuery::kMayBeNarrow) {
      if (segment.end_tile - segment.tile >= kWorthwhileTiles) this->narrow(Q_rmem);
    }
  }

  __device__ __forceinline__ void get(uint32_t (&a)[1][4], int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[0][i] = Q_rmem[4 * k + i];
  }
};

// The same in a warp's copy in shared memory: the even words of each 16 columns, then the odd ones.
template <typename Spec>
struct ByteQueryCopy : NarrowQuery<typename Spec::Element>, mma_sync::QueryOperand<Spec, Spec::kHeadDim, false> {
  using Element = typename Spec::Element;
  using Operand = mma_sync::QueryOperand<Spec, Spec::kHeadDim, false>;
  using Tile = RowTile<Element, Spec::kHeadDim>;

  __device__ __forceinline__ static void copy(const ForwardParams&, const Element*, const Segment&, ptx::SmemPointer) {}

  __device__ __forceinline__ ByteQueryCopy(const ForwardParams&, const Element*, const Segment&,
                                           ptx::SmemPointer Q_smem)
      : Operand(Q_smem) {}

  // Each lane copies half a row.
  __device__ __forceinline__ void prepare(const ForwardParams& params, const Element* Q_gmem, const Segment& segment,
                                          ptx::SmemPointer Q_smem) {
    constexpr int kGroups = Spec::kHeadDim / 32;  // groups of 16 columns
    const int row = ptx::lane_index() / 2, first_group = ptx::lane_index() % 2 * kGroups;
    const Element* row_gmem =
        Q_gmem + query_row<Spec>(params, segment, min(segment.rows - 1, row)).offset(params.q_stride);
    uint32_t words[kGroups * 8];
#pragma unroll
    for (int chunk = 0; chunk < 2 * kGroups; ++chunk) {
      const int column = first_group * 16 + chunk * 8;
      uint32_t loaded[4] = {0, 0, 0, 0};
      if (column < params.head_dim) ptx::ld_global_128(loaded, row_gmem + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[4 * chunk + i] = loaded[i];
    }
    if constexpr (ByteQueryCopy::kMayBeNarrow) {
      if (segment.end_tile - segment.tile >= kWorthwhileTiles) this->narrow(words);
    }
    ptx::warp_sync();  // write after read: the previous Q
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const uint32_t stored[4] = {words[8 * group + odd], words[8 * group + 2 + odd], words[8 * group + 4 + odd],
                                    words[8 * group + 6 + odd]};
        ptx::st_shared_128(Q_smem + Tile::offset(row, (first_group + group) * 2 + odd), stored);
      }
  }
};

template <typename Spec, bool kKeepsOrder = Spec::kKeepsOrder, bool kInRegisters = Spec::kQueryInRegisters>
struct CodeQueryOf {
  using Type = typename QueryOf<Spec>::Type;
};
template <typename Spec>
struct CodeQueryOf<Spec, false, true> {
  using Type = ByteQuery<Spec>;
};
template <typename Spec>
struct CodeQueryOf<Spec, false, false> {
  using Type = ByteQueryCopy<Spec>;
};

// A lane's address in a tile of codes, 32 columns further with each step.
template <typename Tile>
__device__ __forceinline__ ptx::SmemPointer step_along(ptx::SmemPointer lane_smem, int step) {
  constexpr int kSteps = Tile::kLanes / 2;  // steps per segment, within which the swizzle permutes
  return (lane_smem ^ (step % kSteps * (2 * kChunkBytes))) + step / kSteps * (Tile::kLanes * kChunkBytes);
}

// V of one key tile, as accumulate_tile takes it.
template <typename Spec>
struct CodeValues {
  using Element = typename Spec::Element;
  static constexpr bool kMaySkip = true;
  static constexpr bool kDrops = false;

  ptx::SmemPointer V_smem;
  float unit_ratio;  // the output's unit before this tile / that of this tile
  float weight;      // factor of the probabilities
  bool has_upper;    // the item has some of rows 8 to 15

  __device__ __forceinline__ bool skips(int half) const { return half == 1 && !has_upper; }

  __device__ __forceinline__ void change_units(float (&O_rmem)[1][Spec::kMmaD][4]) const {
    if (unit_ratio == 1.0f) return;  // as for most tiles
#pragma unroll
    for (int d = 0; d < Spec::kMmaD; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) O_rmem[0][d][i] *= unit_ratio;
  }
  __device__ __forceinline__ float scale_probability(float p) const { return p * weight; }

  __device__ __forceinline__ ptx::SmemPointer walk() const {
    const int lane = ptx::lane_index();
    return V_smem + Spec::KeyTile::offset(lane % 16, lane / 16);
  }

  // Converts bf16 P to f16, because converting V's codes to f16 takes a quarter of the instructions. Returns false if a
  // row of the item would lose bits.
  __device__ __forceinline__ bool narrow(uint32_t (&narrow_rmem)[4], const uint32_t (&P_rmem)[4]) const {
    bool is_exact = true;
    const auto convert = [&](int i) {
      const float2 wide = unpack<Element>(P_rmem[i]);
      narrow_rmem[i] = pack<ptx::F16>(wide.x, wide.y);
      const float2 back = unpack<ptx::F16>(narrow_rmem[i]);
      is_exact = is_exact && pack<Element>(back.x, back.y) == P_rmem[i];
    };
    convert(0);
    convert(2);
    narrow_rmem[1] = narrow_rmem[3] = 0;
    if (has_upper) {
      convert(1);
      convert(3);
    }
    return ptx::vote_all(is_exact);
  }

  __device__ __forceinline__ void multiply(float (&O_rmem)[1][Spec::kMmaD][4], const uint32_t (&P_rmem)[1][4],
                                           ptx::SmemPointer lane_smem, int) const {
    if constexpr (kWeightUnit<Spec> != 1.0f) {
      uint32_t narrow_rmem[4];
      if (narrow(narrow_rmem, P_rmem[0])) {
        multiply_codes<ptx::F16>(O_rmem, narrow_rmem, lane_smem);
        return;
      }
    }
    multiply_codes<Element>(O_rmem, P_rmem[0], lane_smem);
  }

  // The transposed load gives a lane the same two adjacent columns of two keys: an even column, which belongs to one
  // block of the output, and an odd one, which belongs to the other.
  template <typename Operand>
  __device__ __forceinline__ static void multiply_codes(float (&O_rmem)[1][Spec::kMmaD][4], const uint32_t (&P_rmem)[4],
                                                        ptx::SmemPointer lane_smem) {
#pragma unroll
    for (int step = 0; step < Spec::kHeadDim / 32; ++step) {
      uint32_t codes[4];  // keys 0 to 7 and 8 to 15 of 16 columns, then of the next 16
      ptx::ldmatrix_x4_trans(codes, step_along<typename Spec::KeyTile>(lane_smem, step));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t first[2], last[2];  // keys in the even column, and in the odd one
        ptx::unpack_alternate_e4m3<Operand>(first, codes[2 * i]);
        ptx::unpack_alternate_e4m3<Operand>(last, codes[2 * i + 1]);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float (&block)[4] = O_rmem[0][4 * step + 2 * i + odd];
          if constexpr (kWeightUnit<Spec> != 1.0f) {
            ptx::mma_m16n8k16<Operand>(block, P_rmem, first[odd], last[odd]);
          } else {
            Spec::multiply(block, P_rmem, first[odd], last[odd]);
          }
        }
      }
    }
  }
};

// Returns whether the output can be in units of a page's scale: a change between two of these keeps it in the range of
// float32.
__device__ __forceinline__ bool is_unit(float scale) {
  constexpr uint32_t kLeast = (127 - 40) << 23, kMost = (127 + 40) << 23;
  const uint32_t magnitude = ptx::float_bits(scale) & 0x7fffffffu;
  return magnitude >= kLeast && magnitude <= kMost;
}

// 1 / scale of such a unit; exact for a power of two.
__device__ __forceinline__ float inverse_of(float scale) {
  const uint32_t bits = ptx::float_bits(scale), exponent = bits >> 23 & 0xffu;
  const float fraction = ptx::bits_float((bits & 0x807fffffu) | 127u << 23);
  return ptx::rcp_approx(fraction) * ptx::bits_float((254u - exponent) << 23);
}

// The scale of a sequence, without its factor, because a product here would wait for the load.
__device__ __forceinline__ float load_scale(const CacheScale& scale, int64_t index, int head) {
  if (scale.is_of_pages || scale.values == nullptr) return 1.0f;
  return ptx::ld_global_float(scale.values + index * scale.stride + head * scale.head_stride);
}

// Loads a warp's keys, tile by tile, and their scales.
template <typename Spec>
struct E4m3Loader : KeyLoader<Spec, Words::kByReuse> {
  using Base = KeyLoader<Spec, Words::kByReuse>;
  using Element = typename Spec::Element;
  using Tile = typename Spec::KeyTile;
  using Query = typename CodeQueryOf<Spec>::Type;
  static constexpr bool kMayBeNarrow = !Spec::kKeepsOrder && kIsBF16<Element>;

  const E4m3ForwardParams& cache;
  const int head_kv;
  const bool has_upper;               // CodeValues
  const ptx::SmemPointer scale_smem;  // [kNumStages, 2] of the warp, if pages have scales
  float key_scale;                    // of the sequence; if pages have scales, of the current tile
  float value_unit;                   // factor of the output at the end
  float value_ratio;                  // of the current tile, for CodeValues
  float value_weight;

  __device__ __forceinline__ E4m3Loader(const ForwardParams& params, const Sequence<MaskKind::kRuntime>& sequence,
                                        const Segment& segment, KvReuse reuse, const E4m3ForwardParams& cache_)
      : Base(params, sequence, segment, reuse),
        cache(cache_),
        head_kv(segment.head_kv),
        has_upper(segment.rows > 8),
        scale_smem(ptx::SmemPointer(ptx::dynamic_shared_memory()) + Spec::kScaleOffset +
                   ptx::warp_index() * Spec::kScaleBytes),
        key_scale(load_scale(cache_.k_scale, segment.batch, head_kv)),
        value_unit(load_scale(cache_.v_scale, segment.batch, head_kv)),
        value_ratio(1.0f),
        value_weight(1.0f) {}

  __device__ __forceinline__ void begin() {
    if (!cache.k_scale.is_of_pages) key_scale *= cache.k_scale.factor;
    if (!cache.v_scale.is_of_pages) value_unit *= cache.v_scale.factor;
  }

  __device__ __forceinline__ bool sees_some(int tile) const {
    const int first = Base::first_key(tile);
    return first + kWarpKeys > this->visible.begin && first < this->visible.end;
  }

  // Loads K, V and the scales of their page: one page holds all 16 keys, and the lane of the first visible key has its
  // number.
  __device__ __forceinline__ void load(int tile, int stage, ptx::SmemPointer stage_smem) const {
    const bool has_value = Base::has_value();
    // Two reads of constants: a single one whose address depends on the lane would have to be waited for.
    const int32_t keys_are_scaled = cache.k_scale.is_of_pages, values_are_scaled = cache.v_scale.is_of_pages;
    if ((has_value ? values_are_scaled : keys_are_scaled) != 0) {
      const CacheScale& scale = has_value ? cache.v_scale : cache.k_scale;
      const int first = Base::first_key(tile);
      const int key = first + ptx::lane_index() % kWarpKeys;
      if (key == max(first, this->visible.begin) && key < this->visible.end) {
        ptx::cp_async_4(
            scale_smem + (2 * stage + has_value) * 4,
            scale.values + this->sequence.clamp_page(this->page) * scale.stride + head_kv * scale.head_stride);
      }
    }
    this->load_keys(tile, stage_smem);
  }

  __device__ __forceinline__ void multiply(float (&S_rmem)[1][Spec::kMmaN][4], const Query& Q, ptx::SmemPointer K_smem,
                                           int tile, int stage) {
    float factor = 1.0f;
    if constexpr (kMayBeNarrow) {
      if (Q.is_narrow) {
        multiply_codes<ptx::F16>(S_rmem, Q, K_smem);
        factor = Q.inverse_factor;
      } else {
        multiply_codes<Element>(S_rmem, Q, K_smem);
      }
    } else {
      multiply_codes<Element>(S_rmem, Q, K_smem);
    }
    if (cache.k_scale.is_of_pages && sees_some(tile)) {
      key_scale = cache.k_scale.factor * ptx::ld_shared_float(scale_smem + 2 * stage * 4);
    }
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) S_rmem[0][n][i] *= factor * key_scale;
    value_ratio = value_weight = 1.0f;
    if (!cache.v_scale.is_of_pages || !sees_some(tile)) return;
    const float scale = cache.v_scale.factor * ptx::ld_shared_float(scale_smem + (2 * stage + 1) * 4);
    if (scale == value_unit) return;
    if (is_unit(scale)) {
      value_ratio = value_unit * inverse_of(scale);
      value_unit = scale;
    } else {  // zero, or a scale that no cache would have
      value_weight = scale * inverse_of(value_unit);
    }
  }

  template <typename Operand>
  __device__ __forceinline__ static void multiply_codes(float (&S_rmem)[1][Spec::kMmaN][4], const Query& Q,
                                                        ptx::SmemPointer K_smem) {
    const int lane = ptx::lane_index();
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) S_rmem[0][n][i] = 0.0f;
    if constexpr (Spec::kKeepsOrder) {
      // Each lane needs two of every eight columns: half of a word, of which the adjacent lane needs the other half.
#pragma unroll
      for (int k = 0; k < Spec::kHeadDim / 16; ++k) {
        uint32_t a[1][4];
        Q.get(a, k);
#pragma unroll
        for (int n = 0; n < Spec::kMmaN; ++n) {
          const ptx::SmemPointer chunk_smem = K_smem + (Tile::offset(n * 8 + lane / 4, k) + lane % 4 / 2 * 4);
          uint32_t b[2];
          ptx::unpack_alternate_e4m3<Element>(
              b, ptx::permute_bytes(ptx::ld_shared_32(chunk_smem), ptx::ld_shared_32(chunk_smem + 8),
                                    lane % 2 == 0 ? 0x5140 : 0x7362));
          Spec::multiply(S_rmem[0][n], a[0], b[0], b[1]);
        }
      }
    } else {
      const ptx::SmemPointer lane_smem = K_smem + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
      for (int step = 0; step < Spec::kHeadDim / 32; ++step) {
        uint32_t codes[4];  // keys 0 to 7, of 16 columns and of the next 16; keys 8 to 15
        ptx::ldmatrix_x4(codes, step_along<Tile>(lane_smem, step));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          uint32_t a[1][4];
          Q.get(a, 2 * step + k);
#pragma unroll
          for (int n = 0; n < Spec::kMmaN; ++n) {
            uint32_t b[2];
            ptx::unpack_e4m3<Operand>(b, codes[2 * n + k]);
            ptx::mma_m16n8k16<Operand>(S_rmem[0][n], a[0], b[0], b[1]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ CodeValues<Spec> values(ptx::SmemPointer V_smem) const {
    return {V_smem, value_ratio, value_weight * kWeightUnit<Spec>, has_upper};
  }

  // Converts the output to units of one, and puts a lane's four columns in order: two adjacent blocks hold the even and
  // the odd ones.
  __device__ __forceinline__ void finish(float (&O_rmem)[1][Spec::kMmaD][4]) const {
    const float unit = value_unit * (1.0f / kWeightUnit<Spec>);
#pragma unroll
    for (int d = 0; d < Spec::kMmaD; d += 2)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&even)[4] = O_rmem[0][d];
        float (&odd)[4] = O_rmem[0][d + 1];
        const float third = even[2 * half + 1] * unit;
        even[2 * half] *= unit;
        even[2 * half + 1] = odd[2 * half] * unit;
        odd[2 * half] = third;
        odd[2 * half + 1] *= unit;
      }
  }
};

template <typename Spec>
__device__ __forceinline__ void decode_e4m3(const E4m3ForwardParams& params) {
  for_each_segment<Spec>(params.forward, [&](const Segment& segment, KvReuse reuse, const WarpResults<Spec>& results) {
    attend<Spec, E4m3Loader<Spec>>(params.forward, segment, reuse, results, params);
  });
}

}  // namespace flashmoe::attention::decode
