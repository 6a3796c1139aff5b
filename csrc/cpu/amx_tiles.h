// The tile unit: its configuration, numbers as planes of bf16, and products of tiles done a step at a time. Include after
// vector_avx512.h. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "forward_simd.h"
#include "scalar_types.h"

namespace flashmoe {
namespace cpu {
namespace {

constexpr int32_t kTileRows = 16;
constexpr int32_t kTileBytesPerRow = 64;
constexpr int32_t kTileBytes = kTileRows * kTileBytesPerRow;
constexpr int64_t kTileWords = kTileBytes / 4;  // each a pair of bf16, or one float
constexpr int32_t kStep = 32;                   // elements of the summed dimension that one tile product takes
static_assert(kGroupRows == 2 * kTileRows, "a group is two tiles high");
static_assert(kBlockKeys % kStep == 0, "a block is whole steps");

template <class T>
struct Planes;
template <>
struct Planes<BFloat16> {
  static constexpr int value = 1;
};
template <>
struct Planes<Half> {
  static constexpr int value = 2;
};
template <>
struct Planes<float> {
  static constexpr int value = 3;
};

// Pairs of planes to multiply, in an order that loads few tiles twice. kScores of fp16 are exact products: what (1, 1)
// adds is up to 2^-16 of a score, which is seen in the lse of large ones.
struct PlanePair {
  int a;
  int b;
};
enum class Product { kScores, kOutput };
template <int kPlanes, Product kProduct>
struct PlanePairs;
template <Product kProduct>
struct PlanePairs<1, kProduct> {
  static constexpr int kCount = 1;
  static constexpr PlanePair kPairs[] = {{0, 0}};
};
template <>
struct PlanePairs<2, Product::kScores> {
  static constexpr int kCount = 4;
  static constexpr PlanePair kPairs[] = {{0, 1}, {1, 1}, {1, 0}, {0, 0}};
};
template <>
struct PlanePairs<2, Product::kOutput> {
  static constexpr int kCount = 3;
  static constexpr PlanePair kPairs[] = {{0, 1}, {0, 0}, {1, 0}};
};
template <Product kProduct>
struct PlanePairs<3, kProduct> {
  static constexpr int kCount = 6;
  static constexpr PlanePair kPairs[] = {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 0}};
};

// The intrinsics are asm statements that do not say which memory they read: keep the compiler from moving stores.
inline void order_memory() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// All eight tiles 16 x 64 bytes; whoever uses tiles next configures its own. (A guard object would bring exception
// tables into a translation unit that throws nothing.)
inline void configure_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_per_row[tile] = kTileBytesPerRow;
    config.rows[tile] = kTileRows;
  }
  order_memory();
  _tile_loadconfig(&config);
}

// The tile unit falls asleep when it has had nothing to multiply for some 0.4 us (measured on a Sapphire Rapids), and
// waking it stalls the core for 0.28 us, as long as a product of 128 keys takes. So vector code between two products
// gives it a tile now and then. The product goes to tile 0, which is free then; what is in it does not matter.
inline void keep_awake() { _tile_dpbf16ps(0, 4, 6); }

// Two values a lane to one word a lane and plane: plane i's 8 bits of `low` in the low half, of `high` in the high one.
// The planes' sum is the value: exactly for three planes, rounded in the second of two.
template <int kPlanes>
inline void split_pair(__m512 low, __m512 high, __m512i (&words)[kPlanes]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
#pragma GCC unroll 3
  for (int plane = 0; plane < kPlanes; ++plane) {
    __m512i low_bits = _mm512_castps_si512(low), high_bits = _mm512_castps_si512(high);
    if (plane == 1 && kPlanes == 2) {
      low_bits = _mm512_add_epi32(low_bits, _mm512_set1_epi32(0x8000));
      high_bits = _mm512_add_epi32(high_bits, _mm512_set1_epi32(0x8000));
    }
    constexpr int kSelect = 0xca;  // first ? second : third, bit by bit
    words[plane] = _mm512_ternarylogic_epi32(upper, high_bits, _mm512_srli_epi32(low_bits, 16), kSelect);
    if (plane < kPlanes - 1) {
      low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_and_si512(low_bits, upper)));
      high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_and_si512(high_bits, upper)));
    }
  }
}

// One plane, rounded: `low` in the first sixteen of 32 elements, `high` in the last.
template <>
inline void split_pair<1>(__m512 low, __m512 high, __m512i (&words)[1]) {
  const __m512bh pair = _mm512_cvtne2ps_pbh(high, low);
  memcpy(words, &pair, sizeof pair);
}

// A left operand: two tiles of 16 rows, steps of 64 bytes side by side. Distances in bytes.
struct LeftOperand {
  const char* data;
  int64_t plane;
  int64_t row;
};

// A right operand in tiles of [16 pairs of the summed dimension, 16 columns], by panels of 32 columns: [panels][steps]
// [planes][2] tiles, read from the first to the last. Distance in bytes.
constexpr int32_t kPanelColumns = 2 * kTileRows;
struct RightOperand {
  const char* data;
  int64_t panel;
};

// c [32, 32 panels] = sum over steps and plane pairs of a [32, 32 steps] b [32 steps, 32 panels]. c_row: floats from a
// row of c to the next. Two tiles by two: with one by four b would be read twice as often, from the L2 cache as a rule.
// Rejected: doing a step here and there between the rows of another group's softmax. The second group's scores and
// weights push the first's out of the L1 cache, and the two units share ports.
template <int kPlanes, Product kProduct>
inline void multiply_tiles(const LeftOperand& a, const RightOperand& b, int32_t steps, int32_t panels, float* c,
                           int64_t c_row) {
  using Pairs = PlanePairs<kPlanes, kProduct>;
  const int64_t c_row_bytes = c_row * static_cast<int64_t>(sizeof(float));
  order_memory();
  for (int32_t panel = 0; panel < panels; ++panel, c += kPanelColumns) {
    const char* a_step = a.data;
    const char* b_step = b.data + panel * b.panel;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int32_t step = 0; step < steps; ++step) {
#pragma GCC unroll 6
      for (int pair = 0; pair < Pairs::kCount; ++pair) {
        const int a_plane = Pairs::kPairs[pair].a, b_plane = Pairs::kPairs[pair].b;
        if (pair == 0 || b_plane != Pairs::kPairs[pair - 1].b) {
          _tile_loadd(6, b_step + (2 * b_plane) * kTileBytes, kTileBytesPerRow);
          _tile_loadd(7, b_step + (2 * b_plane + 1) * kTileBytes, kTileBytesPerRow);
        }
        if (pair == 0 || a_plane != Pairs::kPairs[pair - 1].a) {
          _tile_loadd(4, a_step + a_plane * a.plane, a.row);
          _tile_loadd(5, a_step + a_plane * a.plane + kTileRows * a.row, a.row);
        }
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      a_step += kTileBytesPerRow;
      b_step += 2 * kPlanes * kTileBytes;
    }
    _tile_stored(0, c, c_row_bytes);
    _tile_stored(1, c + kTileRows, c_row_bytes);
    _tile_stored(2, c + kTileRows * c_row, c_row_bytes);
    _tile_stored(3, c + kTileRows * c_row + kTileRows, c_row_bytes);
  }
  order_memory();
}

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
