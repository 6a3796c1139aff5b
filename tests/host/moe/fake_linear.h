// Linear's kernel that sums in segments, as plain loops. Included by fake_gpu.cpp.
#include <malloc.h>

std::string linear_factors(const linear::LinearParams& params) {
  return std::to_string(reinterpret_cast<uintptr_t>(params.gemm.a)) + ", " +
         std::to_string(reinterpret_cast<uintptr_t>(params.gemm.b)) + ", " + std::to_string(params.segments) + ", " +
         (params.partials != nullptr ? "true" : "false");
}

std::string multiply_linear(const host::Kernel& kernel, const linear::LinearParams& params, int64_t grid) {
  const GemmParams& p = params.gemm;
  if (p.expert_offsets != nullptr || p.tile_counter != nullptr) return "experts, or a counter of tiles";
  const int64_t tiles =
      ((p.slots + kernel.block_m - 1) / kernel.block_m) * ((p.n + kernel.block_n - 1) / kernel.block_n);
  const int64_t consumers = tiles * (kernel.block_m / 64), blocks = params.partials != nullptr ? params.segments : 1;
  if (grid != std::min<int64_t>(tiles * blocks, int64_t{host::g_gpu.num_multiprocessors} * kernel.min_blocks))
    return "another grid";
  if ((params.partials != nullptr) != (params.arrivals != nullptr)) return "partial sums and arrivals go together";
  if (params.partials != nullptr) {
    const int64_t sums = consumers * params.segments * 64 * kernel.block_n;
    if (malloc_usable_size(params.partials) < sums * sizeof(float)) return "no room for the partial sums";
    std::fill(params.partials, params.partials + sums, NAN);
    if (consumers > host::kMaxCounters) return "no counter for each consumer";
    if (std::any_of(params.arrivals, params.arrivals + consumers, [](int32_t count) { return count != 0; })) {
      return "arrivals are not zero";
    }
  }
  const GemmKernel run(p, WeightLayout::kNk);
  for (int64_t row = 0; !is_long(p) && row < p.slots; ++row) run.plain(0, row);
  return "";
}
