// The amx kernel: bf16 and fp16 on the tile unit. fp32, few rows, bands, unequal head dims, consistent calls and the
// row blocks that amx_forward.h gives up run on avx512's kernel, with vectors. docs/kernels/cpu.md has the
// measurements.
//
// The target is set here, not by compiler flags, so that all host files are compiled alike; it must come before the
// intrinsics' header. Only this kernel's table entry may be visible outside the translation unit.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,amx-tile,amx-bf16")

#include "cpu/vector_avx512.h"

#include "attention/cpu/amx_forward.h"
#include "attention/cpu/forward_few_rows.h"

namespace flashmoe::cpu {
namespace {

template <class T>
void forward_amx(const Task& task, void* memory) {
  configure_tiles();
  uint32_t fallback_blocks = AmxForward<T>(task, memory).run();
  _tile_release();
  for (int32_t row = task.row_begin; fallback_blocks != 0; fallback_blocks >>= 1, row += kBlockRows) {
    if ((fallback_blocks & 1) == 0) continue;
    Task block = task;
    block.row_begin = row;
    block.row_end = clamp(int64_t{row} + kBlockRows, 0, task.row_end);
    kAvx512Kernel.run(block, memory);
  }
}

void run_amx(const Task& task, void* memory) {
  const bool is_plain = !task.has_options && task.head_dim_v == task.params->head_dim;
  // A block of rows is given up as a whole, so a row's bits would depend on its neighbours: consistent calls use
  // vectors throughout.
  if (task.type == ScalarType::kFloat32 || has_few_rows(*task.params) || !is_plain || task.params->is_consistent != 0) {
    return kAvx512Kernel.run(task, memory);
  }
  return task.type == ScalarType::kFloat16 ? forward_amx<Half>(task, memory) : forward_amx<BFloat16>(task, memory);
}

size_t amx_scratch_bytes(ScalarType type, int32_t head_dim, int32_t rows) {
  const int32_t row_blocks = row_block_count(rows), padded_dim = round_up(head_dim, kStep);
  const size_t simd_bytes = kAvx512Kernel.scratch_bytes(type, head_dim, rows);
  if (type == ScalarType::kFloat32) return simd_bytes;
  const size_t bytes = type == ScalarType::kFloat16 ? AmxScratch<Half>(nullptr, row_blocks, padded_dim).bytes
                                                    : AmxScratch<BFloat16>(nullptr, row_blocks, padded_dim).bytes;
  return bytes > simd_bytes ? bytes : simd_bytes;
}

}  // namespace

extern const Kernel kAmxKernel = {kBlockRows, amx_scratch_bytes, run_amx};

}  // namespace flashmoe::cpu
