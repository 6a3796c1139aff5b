// AMX tiles: configuration, operands in planes of bf16, and products of 32 x 32 elements. Include after
// vector_avx512.h. Internal linkage.
//
// AMX multiplies bf16 and adds in fp32. bf16 tensors are operands as they are, one plane; fp16 tensors are split into
// two planes of 8 significant bits, x = x0 + x1, exactly, and the products of planes are added.
#pragma once

#include <cstdint>

#include "cpu/scalar_types.h"

namespace flashmoe::cpu {
namespace {

constexpr int32_t kTileRows = 16;
constexpr int32_t kTileBytesPerRow = 64;
constexpr int32_t kTileBytes = kTileRows * kTileBytesPerRow;
constexpr int64_t kTileWords = kTileBytes / 4;    // each a pair of bf16, or one float
constexpr int32_t kStep = 32;                     // elements of the summed dimension that one tile product takes
constexpr int32_t kBlockColumns = 2 * kTileRows;  // of a right operand and of a product
constexpr int64_t kProductFloats = int64_t{2} * kTileRows * kBlockColumns;
constexpr int64_t kProductRowBytes = kBlockColumns * sizeof(float);
constexpr int64_t kStepBytes = 2 * kTileBytes;  // per plane: two tiles of an operand

template <class T>
constexpr int kPlanesOf = 0;
template <>
constexpr int kPlanesOf<BFloat16> = 1;
template <>
constexpr int kPlanesOf<Half> = 2;

// Plane pairs to multiply, in the order that loads the fewest tiles: with two planes all four or, if 2^-16 of the
// result does not matter, the first three; with one plane only the second.
struct PlanePair {
  int a;
  int b;
};
constexpr PlanePair kPlanePairs[] = {{0, 1}, {0, 0}, {1, 0}, {1, 1}};

// The intrinsics are asm statements that do not say which memory they read: keep the compiler from moving stores.
inline void order_memory() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// All eight tiles as 16 x 64 bytes; other code that uses tiles configures its own. (A guard object would bring
// exception tables into a translation unit that throws nothing.)
inline void configure_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_per_row[tile] = kTileBytesPerRow;
    config.rows[tile] = kTileRows;
  }
  order_memory();
  _tile_loadconfig(&config);
}

// 32 rows, in steps of 32 elements. Distances in bytes: between rows, between steps, between planes.
struct LeftOperand {
  const void* data;
  int64_t row;
  int64_t step;
  int64_t plane;

  const char* at(int32_t step_index, int plane_index) const {
    return static_cast<const char*>(data) + step_index * step + plane_index * plane;
  }
};

// A right operand of 32 columns: [steps][planes][2] tiles of [16 pairs of the summed dimension, 16 columns]. Which
// elements make a pair is free as long as both operands agree.

// A product [32, 32]: tiles 0, 1 above 2, 3.
inline void clear_product() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
inline void load_product(const float* c) {
  _tile_loadd(0, c, kProductRowBytes);
  _tile_loadd(1, c + kTileRows, kProductRowBytes);
  _tile_loadd(2, c + kProductFloats / 2, kProductRowBytes);
  _tile_loadd(3, c + kProductFloats / 2 + kTileRows, kProductRowBytes);
}
inline void store_product(float* c) {
  _tile_stored(0, c, kProductRowBytes);
  _tile_stored(1, c + kTileRows, kProductRowBytes);
  _tile_stored(2, c + kProductFloats / 2, kProductRowBytes);
  _tile_stored(3, c + kProductFloats / 2 + kTileRows, kProductRowBytes);
}

// Adds steps [begin, end) of a b to the product.
template <int kPlanes, int kPairs>
inline void add_products(const LeftOperand& a, const uint32_t* b, int32_t begin, int32_t end) {
  constexpr int kFirst = kPlanes == 1 ? 1 : 0;
  for (int32_t step = begin; step < end; ++step) {
    const char* b_step = reinterpret_cast<const char*>(b) + step * kPlanes * kStepBytes;
#pragma GCC unroll 4
    for (int pair = kFirst; pair < kFirst + kPairs; ++pair) {
      const char* a_tile = a.at(step, kPlanePairs[pair].a);
      const char* b_tile = b_step + kPlanePairs[pair].b * kStepBytes;
      const bool loads_a = pair == kFirst || kPlanePairs[pair].a != kPlanePairs[pair - 1].a;
      const bool loads_b = pair == kFirst || kPlanePairs[pair].b != kPlanePairs[pair - 1].b;
      if (loads_a) _tile_loadd(4, a_tile, a.row);
      if (loads_b) _tile_loadd(6, b_tile, kTileBytesPerRow);
      _tile_dpbf16ps(0, 4, 6);
      if (loads_b) _tile_loadd(7, b_tile + kTileBytes, kTileBytesPerRow);
      _tile_dpbf16ps(1, 4, 7);
      if (loads_a) _tile_loadd(5, a_tile + kTileRows * a.row, a.row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Adds the sums of the rows of steps [begin, end) of a to tiles 0 and 2, in every column, as a product with ones,
// because the vector unit's dot product of bf16 takes two cycles. ones: a tile.
template <int kPlanes>
inline void add_row_sums(const LeftOperand& a, const uint16_t* ones, int32_t begin, int32_t end) {
  _tile_loadd(6, ones, kTileBytesPerRow);
  for (int32_t step = begin; step < end; ++step) {
#pragma GCC unroll 2
    for (int plane = 0; plane < kPlanes; ++plane) {
      const char* a_tile = a.at(step, plane);
      _tile_loadd(4, a_tile, a.row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, a_tile + kTileRows * a.row, a.row);
      _tile_dpbf16ps(2, 5, 6);
    }
  }
}
inline void store_row_sums(float* c) {
  _tile_stored(0, c, kProductRowBytes);
  _tile_stored(2, c + kProductFloats / 2, kProductRowBytes);
}

}  // namespace
}  // namespace flashmoe::cpu
