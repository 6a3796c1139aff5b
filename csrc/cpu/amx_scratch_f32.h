// The scratch memory of the fp32 tile kernel. Include after vector_avx512.h. Internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "amx_units_f32.h"
#include "run_simd.h"

namespace flashmoe {
namespace cpu {
namespace {

constexpr int32_t kBlockSteps = kBlockKeys / kStep;
constexpr int64_t kScoresRow = kBlockSteps * kStepFloats;
constexpr int64_t kScoresFloats = kGroupRows * kScoresRow;

// What a task reads first, in two copies: the next task's is filled while this one runs.
struct F32Operands {
  float* q_planes;  // of the first item: [group][padded_dim / 32 steps] of kF32StepBytes
  float* q_whole;   // of the first item: [group, padded_dim], where Q is not whole
  float* k_whole;   // [kBlockKeys, padded_dim], where K is not whole
  float* v_whole;
  char* k_tiles;    // [kBlockKeys / 32 panels][padded_dim / 32 steps] of F32Right::kF32StepBytes
  char* v_tiles;    // [padded_dim / 32 panels][kBlockKeys / 32 steps] of F32Right::kF32StepBytes
};

struct F32Scratch {
  F32Operands operands[2];
  float* scores;    // [group][kBlockKeys / 32 steps] of kF32StepBytes: scores, then weights
  float* product;   // [group, padded_dim]
  float* alpha;     // [2 items][group]
  float* of_row;    // [group] vectors: sums of weights
  void* simd;       // for forward_simd, of one group
  // From here on places depend on the task's height.
  float* q_planes;  // [groups][group][padded_dim / 32 steps] of kF32StepBytes
  float* q_whole;   // [groups][group, padded_dim]
  float* max_log2;  // [groups, group]
  float* sum;       // [groups, group]
  float* out;       // [groups][group, padded_dim], where there are several blocks
  size_t bytes;

  F32Scratch(void* base, int32_t groups, int32_t head_dim) {
    Arena arena(base);
    const int32_t padded_dim = round_up(head_dim, kStep);
    const int64_t group_elements = int64_t{kGroupRows} * padded_dim;
    const int64_t block_elements = int64_t{kBlockKeys} * padded_dim;
    for (F32Operands& copy : operands) {
      copy.q_planes = arena.take<float>(group_elements / kStep * kStepFloats);
      copy.q_whole = arena.take<float>(group_elements);
      copy.k_whole = arena.take<float>(block_elements);
      copy.v_whole = arena.take<float>(block_elements);
      copy.k_tiles = arena.take<char>(block_elements / (kStep * kStep) * F32Right::kF32StepBytes);
      copy.v_tiles = arena.take<char>(block_elements / (kStep * kStep) * F32Right::kF32StepBytes);
    }
    scores = arena.take<float>(kScoresFloats);
    product = arena.take<float>(group_elements);
    alpha = arena.take<float>(2 * kGroupRows);
    of_row = arena.take<float>(kGroupRows * Vector::kWidth);
    simd = arena.take<char>(static_cast<int64_t>(simd_scratch_bytes(ScalarType::kFloat32, head_dim, kGroupRows)));
    q_planes = arena.take<float>(groups * group_elements / kStep * kStepFloats);
    q_whole = arena.take<float>(groups * group_elements);
    max_log2 = arena.take<float>(int64_t{groups} * kGroupRows);
    sum = arena.take<float>(int64_t{groups} * kGroupRows);
    out = arena.take<float>(groups * group_elements);
    bytes = arena.used();
  }
};

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
