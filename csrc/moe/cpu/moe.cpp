// Divides products into tasks (expert x rows x panels of columns) and runs them on the caller's thread pool.
#include "moe/cpu/moe.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "cpu/isa.h"
#include "moe/params/mxfp4.h"

namespace flashmoe::cpu {
namespace {

// Rows that share a packed panel: packing it then takes 3% of the time, and a task's packed rows (280 KiB) stay in the
// L2 cache beside the sums.
constexpr int32_t kMaxTaskRows = 264;
// Most columns of a task: the sums of its rows for that many (528 KiB) are kept between blocks of the summed dimension.
constexpr int32_t kMaxTaskColumns = 512;
constexpr int64_t kTasksPerThread = 4;

const MoeKernel& kernel_in_use() {
  static constexpr std::array<const MoeKernel*, kIsaCount> kKernels = {FLASHMOE_CPU_KERNELS(
      &kMoeBaselineKernel, &kMoeAvx2Kernel, &kMoeAvx512Kernel, &kMoeAvx512Bf16Kernel, &kMoeAvx512Bf16Kernel)};
  return *kKernels[static_cast<size_t>(current_isa())];
}

int32_t divide_up(int64_t a, int32_t b) { return static_cast<int32_t>((a + b - 1) / b); }

// Calls body(begin, end) on ranges that cover [0, count), on the pool's threads. It must not throw.
template <class Body>
void divide(int64_t count, const Pool& pool, const Body& body) {
  if (count == 0) return;
  const auto call = [](int64_t begin, int64_t end, void* context) noexcept {
    (*static_cast<const Body*>(context))(begin, end);
  };
  void* context = const_cast<Body*>(&body);
  if (pool.num_threads == 1 || count == 1) return call(0, count, context);
  pool.parallel_for(0, count, divide_up(count, pool.num_threads), call, context);
}

struct GemmPlan {
  std::vector<GemmTask> tasks;
  int32_t rows = 0;  // of the largest task
  int32_t panels = 0;
};

// Tasks of about equal size, as wide as possible: a task's packed rows are used for all of its columns.
GemmPlan plan_tasks(const GemmTask& whole, const MoeKernel& kernel, int num_threads) {
  const moe::GemmParams& params = *whole.params;
  const bool is_gradient = whole.product == MoeProduct::kWeightGradient;
  const int32_t columns = is_gradient ? params.k : params.n;
  int32_t panels = divide_up(columns, kernel.panel_columns);
  if (whole.product == MoeProduct::kGated) panels = divide_up(columns / 2, kernel.panel_columns / 2);
  int64_t chunks = 0;
  const auto rows_of = [&](int32_t expert, int32_t* begin) {
    *begin = is_gradient ? 0 : params.expert_offsets[expert];
    return is_gradient ? params.n : params.expert_offsets[expert + 1] - *begin;
  };
  GemmPlan plan;
  int32_t begin = 0;
  for (int32_t expert = 0; expert < params.experts; ++expert)
    chunks += divide_up(rows_of(expert, &begin), kMaxTaskRows);
  int32_t pieces = divide_up(panels, std::max(1, kMaxTaskColumns / kernel.panel_columns));
  while (chunks > 0 && chunks * pieces < kTasksPerThread * num_threads && pieces < panels) ++pieces;
  plan.panels = divide_up(panels, std::max(1, pieces));
  for (int32_t expert = 0; expert < params.experts; ++expert) {
    const int64_t rows = rows_of(expert, &begin);
    const int32_t parts = divide_up(rows, kMaxTaskRows);
    for (int32_t part = 0; part < parts; ++part) {
      GemmTask task = whole;
      task.expert = expert;
      task.row_begin = begin + static_cast<int32_t>(rows * part / parts);
      task.row_end = begin + static_cast<int32_t>(rows * (part + 1) / parts);
      plan.rows = std::max(plan.rows, task.row_end - task.row_begin);
      for (task.panel_begin = 0; task.panel_begin < panels; task.panel_begin = task.panel_end) {
        task.panel_end = std::min(panels, task.panel_begin + plan.panels);
        plan.tasks.push_back(task);
      }
    }
  }
  return plan;
}

}  // namespace

void moe_multiply(const moe::GemmParams& params, MoeProduct product, ScalarType type, bool is_kn, const Pool& pool) {
  const MoeKernel& kernel = kernel_in_use();
  const GemmPlan plan = plan_tasks({&params, product, type, is_kn, 0, 0, 0, 0, 0}, kernel, pool.num_threads);
  const int64_t count = static_cast<int64_t>(plan.tasks.size());
  if (count == 0) return;
  const size_t bytes = kernel.scratch_bytes(plan.rows, plan.panels);
  std::atomic<int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
  // Each index is a thread, which takes tasks until none is left.
  divide(std::min<int64_t>(pool.num_threads, count), pool, [&](int64_t, int64_t) {
    thread_local Scratch scratch;
    try {
      void* memory = scratch.reserve(bytes);
      for (int64_t i = next++; i < count; i = next++) kernel.multiply(plan.tasks[static_cast<size_t>(i)], memory);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  });
  // A thread without memory leaves its tasks to the others; only if no thread could work is anything left undone.
  if (out_of_memory && next < count) throw std::bad_alloc();
}

int32_t moe_dot_columns() { return kernel_in_use().panel_columns; }

void moe_expand_mxfp4(const Mxfp4Weights& expert, const Pool& pool) {
  static constexpr std::array<float, 8> kNumbers = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  divide(expert.n, pool, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* codes = expert.codes + row * expert.codes_stride;
      uint16_t* weights = expert.weights + row * expert.k;
      for (int64_t block = 0; block < expert.k / moe::kMxfp4Block; ++block) {
        const uint8_t scale = expert.scales[row * (expert.k / moe::kMxfp4Block) + block];
        const float power = scale == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0F, scale - 127);
        std::array<uint16_t, 16> by_code;
        for (unsigned code = 0; code < 16; ++code) {
          const float number = kNumbers[code % 8] * power;
          uint32_t bits;
          memcpy(&bits, &number, sizeof(bits));
          // Two bits of mantissa, also for subnormals: truncation loses nothing.
          by_code[code] = static_cast<uint16_t>(bits >> 16 | (code >= 8 ? 0x8000U : 0U));
        }
        for (int byte = 0; byte < moe::kMxfp4Block / 2; ++byte) {
          *weights++ = by_code[*codes & 15];
          *weights++ = by_code[*codes++ >> 4];
        }
      }
    }
  });
}

void moe_combine(const moe::CombineParams& params, ScalarType type, const Pool& pool) {
  const MoeKernel& kernel = kernel_in_use();
  divide(params.tokens, pool, [&](int64_t begin, int64_t end) {
    if (params.out != nullptr) kernel.combine(params, type, begin, end);
    if (params.dweights != nullptr) kernel.weight_gradients(params, type, begin, end);
  });
}

void moe_bias_gradient(const moe::BiasGradientParams& params, ScalarType type, const Pool& pool) {
  const MoeKernel& kernel = kernel_in_use();
  divide(params.experts, pool, [&](int64_t begin, int64_t end) { kernel.bias_gradient(params, type, begin, end); });
}

}  // namespace flashmoe::cpu
