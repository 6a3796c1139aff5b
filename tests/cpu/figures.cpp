// What the parts of the AMX kernel cost on one core, in nanoseconds: the fastest of many runs of each. Printed as JSON.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,amx-tile,amx-bf16")

#include "cpu/vector_avx512.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "cpu/amx_softmax.h"
#include "cpu/amx_softmax_bf16.h"
#include "cpu/amx_tiles.h"
#include "cpu/amx_units_f32.h"

namespace flashmoe {
namespace cpu {
namespace {

alignas(4096) unsigned char g_memory[1 << 20];

template <class Body>
double fastest(int calls, Body body) {
  double best = 1e30;
  for (int run = 0; run < 40; ++run) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) body();
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    if (time.count() < best) best = time.count();
  }
  return best / calls;
}

void four_products() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Numbers of all signs and fractions between 1 and 2: a product of zeros takes less power, and the core's clock is higher.
void load_operands() {
  uint16_t* numbers = reinterpret_cast<uint16_t*>(g_memory);
  std::minstd_rand random;
  for (int i = 0; i < 4 * kTileBytes / 2; ++i) numbers[i] = static_cast<uint16_t>(0x3f80 | (random() >> 8 & 0x807f));
  _tile_loadd(4, g_memory, kTileBytesPerRow);
  _tile_loadd(5, g_memory + kTileBytes, kTileBytesPerRow);
  _tile_loadd(6, g_memory + 2 * kTileBytes, kTileBytesPerRow);
  _tile_loadd(7, g_memory + 3 * kTileBytes, kTileBytesPerRow);
}

// 24 chains of multiply-adds, four links each.
void vector_work() {
  __m512 x[24];
  for (auto& value : x) value = Vector::zero();
  for (int link = 0; link < 4; ++link) {
#pragma GCC unroll 24
    for (auto& value : x) __asm__ volatile("vfmadd231ps %%zmm31, %%zmm31, %0" : "+v"(value));
  }
}
constexpr int kVectorWork = 96;

double load_tiles(int kilobytes) {
  return fastest(200, [&] {
           for (int tile = 0; tile < kilobytes; ++tile) _tile_loadd(6, g_memory + tile * kTileBytes, kTileBytesPerRow);
         }) / kilobytes;
}

double store_tiles() {
  constexpr int kTiles = 16;
  return fastest(200, [&] {
           for (int tile = 0; tile < kTiles; ++tile) _tile_stored(0, g_memory + tile * kTileBytes, kTileBytesPerRow);
         }) / kTiles;
}

double store_vectors(int kilobytes) {
  return fastest(200, [&] {
           for (int line = 0; line < kilobytes * 16; ++line) {
             _mm512_store_si512(g_memory + line * 64, _mm512_setzero_si512());
             order_memory();
           }
         }) / kilobytes;
}

// Weights of one group and 128 keys, per vector of 16 scores.
template <class T>
double softmax() {
  using Layout = ScoresLayout<Planes<T>::value>;
  float* scores = reinterpret_cast<float*>(g_memory);
  for (int64_t i = 0; i < Layout::kFloats; ++i) scores[i] = 0.0f;
  alignas(64) float max_log2[kGroupRows] = {}, sum[kGroupRows] = {}, alpha[kGroupRows] = {};
  return fastest(200, [&] { softmax_to_weights<T>(scores, kBlockKeys, 1.0f, {max_log2, sum, alpha}); }) /
         (kGroupRows * kBlockKeys / Vector::kWidth);
}

// The units of fp32, without products.
template <>
double softmax<float>() {
  constexpr int kSteps = kBlockKeys / kStep;
  constexpr int64_t kRow = kSteps * kStepFloats;
  float* scores = reinterpret_cast<float*>(g_memory);
  float* of_row = scores + kGroupRows * kRow;
  for (int64_t i = 0; i < kGroupRows * kRow; ++i) scores[i] = 0.0f;
  alignas(64) float max_log2[kGroupRows] = {}, sum[kGroupRows] = {}, alpha[kGroupRows] = {}, minus_shift[kGroupRows];
  return fastest(200, [&] {
           take_maxima(scores, kRow, 1.0f, {max_log2, sum, alpha}, minus_shift, NoStep{});
           for (int step = 0; step < kSteps; ++step) {
             keep_awake();
             for (int row = 0; row < kGroupRows; row += kTileRows) {
               weights_of_step(scores + row * kRow + step * kStepFloats, kRow, 1.0f, minus_shift + row,
                               of_row + row * Vector::kWidth, step == 0, NoStep{});
             }
           }
         }) /
         (kGroupRows * kBlockKeys / Vector::kWidth);
}

template <>
double softmax<BFloat16>() {
  constexpr int64_t kScores = kGroupRows * kBlockKeys, kPortion = kRowsAtOnce * kStep;
  float* scores = reinterpret_cast<float*>(g_memory);
  uint16_t* weights = reinterpret_cast<uint16_t*>(g_memory + kScores * sizeof(float));
  for (int64_t i = 0; i < kScores; ++i) scores[i] = 0.0f;
  return fastest(200, [&] {
           for (int64_t i = 0; i < kScores; i += kPortion) {
             scores_to_weights<false>(scores + i, 1.0f, kStep, kStep, weights + i);
             order_memory();
           }
         }) / (kScores / Vector::kWidth);
}

void measure() {
  const double product_of_zeros = fastest(20000, four_products) / 4;
  load_operands();
  const double product = fastest(20000, four_products) / 4;  // 20 ms in all, after which the clock has settled
  const double vectors = fastest(1000, vector_work) / kVectorWork;
  // A tile product every 24 multiply-adds keeps the unit on, at a fraction of its rate.
  const double vectors_beside = fastest(1000, [] {
    _tile_dpbf16ps(0, 4, 6);
    vector_work();
  }) / kVectorWork;
  // Long enough for the tile unit to fall asleep, between two rounds of four products.
  constexpr int kRounds = 160;
  const double alone = fastest(100, [] {
    for (int i = 0; i < kRounds; ++i) vector_work();
  });
  const double woken = fastest(100, [] {
    four_products();
    for (int i = 0; i < kRounds; ++i) vector_work();
  });
  std::printf("{\"tile_product\": %.3f, \"tile_product_of_zeros\": %.3f, ", product, product_of_zeros);
  std::printf("\"multiply_add\": %.4f, \"multiply_add_beside_tiles\": %.4f, ", vectors, vectors_beside);
  std::printf("\"four_products_after_%.0f_ns_of_vectors\": %.1f, ", alone, woken - alone);
  std::printf("\"tile_load_l1\": %.3f, \"tile_load_l2\": %.3f, \"tile_store\": %.3f, ", load_tiles(32), load_tiles(512),
              store_tiles());
  std::printf("\"store_kilobyte_l1\": %.3f, \"store_kilobyte_l2\": %.3f, ", store_vectors(32), store_vectors(512));
  std::printf("\"softmax_vector_f32\": %.3f, \"softmax_vector_f16\": %.3f, \"softmax_vector_bf16\": %.3f}\n",
              softmax<float>(), softmax<Half>(), softmax<BFloat16>());
}

}  // namespace
}  // namespace cpu
}  // namespace flashmoe

int main() {
  constexpr int kArchReqXcompPerm = 0x1023, kXfeatureTileData = 18;
  if (syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) != 0) return 1;
  flashmoe::cpu::configure_tiles();
  flashmoe::cpu::measure();
  _tile_release();
}
