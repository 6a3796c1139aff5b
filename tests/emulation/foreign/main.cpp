// Runs small_product on the emulated machine: prints its report and the largest error.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "emulation/api.h"
#include "emulation/numerics.h"
#include "kernel.cuh"

using flashmoe::emulation::f16_to_float;
using flashmoe::emulation::float_to_f16;
using flashmoe::ptx::F16;

int main(int count, char** words) {
  const int tiles = 11;
  std::vector<F16> a(tiles * 256), b(tiles * 128);
  std::vector<float> c(128);
  std::srand(1);
  for (F16& x : a) x.bits = float_to_f16(static_cast<float>(std::rand() % 17 - 8));
  for (F16& x : b) x.bits = float_to_f16(static_cast<float>(std::rand() % 17 - 8));

  foreign::Params params{};
  params.a = reinterpret_cast<F16*>(emulation_add_buffer(a.data(), a.size() * 2, 0, 1, "a"));
  params.b = reinterpret_cast<F16*>(emulation_add_buffer(b.data(), b.size() * 2, 0, 1, "b"));
  params.c = reinterpret_cast<float*>(emulation_add_buffer(c.data(), c.size() * 4, 1, 0, "c"));
  params.tiles = tiles;

  const void* arguments[] = {&params};
  flashmoe::emulation::Launch launch{};
  launch.entry = [](const void* const* given) {
    foreign::small_product(*static_cast<const foreign::Params*>(given[0]));
  };
  launch.arguments = arguments;
  launch.name = "small_product";
  launch.grid = launch.run_blocks = launch.resident_blocks = 1;
  launch.block = 32 * foreign::kWarps;
  launch.shared_bytes = foreign::kSharedBytes;
  launch.registers = 128;
  launch.tensor_core_block = 16, launch.tensor_core_extra_bits = 2;  // an H100
  launch.async_policy = -1, launch.check_races = 1;
  launch.seed = count > 1 ? std::strtoull(words[1], nullptr, 10) : 0;
  launch.step_limit = 1000000;
  std::puts(emulation_launch(&launch));

  double worst = 0;
  for (int i = 0; i < 128; ++i) {
    double sum = 0;
    for (int k = 0; k < tiles * 16; ++k) {
      sum += static_cast<double>(f16_to_float(a[k / 16 * 256 + i / 8 * 16 + k % 16].bits)) *
             f16_to_float(b[k / 16 * 128 + i % 8 * 16 + k % 16].bits);
    }
    worst = std::fmax(worst, std::fabs(sum - c[i]));
  }
  std::printf("%g\n", worst);
}
