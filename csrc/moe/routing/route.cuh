// The router: scores a token's experts, chooses top_k of them, computes their weights, and counts how many tokens chose
// each expert.
//
// One warp per token. Lane l holds experts l, l + 32, ... as unsigned keys ordered like the values that decide the
// choice; key 0 means no expert. Each choice is two reductions over the warp: of the keys, then of the indices that
// have the largest key. Lane i holds choice i, so there are at most 32 choices. Grid: any number of blocks; warps take
// tokens cyclically.
#pragma once

#include "device/math.cuh"
#include "device/reduce.cuh"
#include "moe/grouped_gemm/activation.cuh"
#include "moe/params/routing.h"
#include "moe/routing/scalars.cuh"
#include "ptx/atomics.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe {

constexpr int kMaxExperts = 1024;
constexpr float kLog2e = 1.44269504f;
constexpr float kSmallestSum = 1e-20f;  // for weights that are all 0: DeepSeek-V3's value, lost in any other sum

template <typename Element_, int kNumWarps_>
struct RouteSpec {
  using Element = Element_;  // unused: the dtype of the logits is a parameter
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = kNumWarps * kMaxExperts * 4;  // each warp's counts
};

// Larger floats have larger keys; no key is 0 and NaN has the largest. -0 is below 0: callers with zeros of both signs
// add 0.
__device__ __forceinline__ uint32_t order_key(float x) {
  if (x != x) return 0xffffffffu;
  const uint32_t bits = ptx::float_bits(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float key_value(uint32_t key) {
  return ptx::bits_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

struct Best {
  uint32_t key;
  int index;
};

// The largest key among the lanes' candidates, and the lowest index among the lanes that have it.
__device__ __forceinline__ Best warp_best(uint32_t key, int index) {
  const uint32_t largest = warp_max(key);
  const uint32_t lowest = warp_min(key == largest ? static_cast<uint32_t>(index) : 0xffffffffu);
  return {largest, static_cast<int>(lowest)};
}

// The best expert of all. Among equal keys of a lane the first wins, which has the lowest index.
template <int kPerLane>
__device__ __forceinline__ Best best_of_all(const uint32_t (&keys)[kPerLane]) {
  uint32_t key = keys[0];
  int index = 0;
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) {
    index = keys[i] > key ? i : index;
    key = keys[i] > key ? keys[i] : key;
  }
  return warp_best(key, 32 * index + ptx::lane_index());
}

struct TwoKeys {
  uint32_t first, second;
};

// The two largest keys of the experts [begin, begin + size).
template <int kPerLane>
__device__ __forceinline__ TwoKeys best_two(const uint32_t (&keys)[kPerLane], int begin, int size) {
  const int lane = ptx::lane_index();
  uint32_t first = 0, second = 0;  // of this lane
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const bool is_inside = static_cast<uint32_t>(32 * i + lane - begin) < static_cast<uint32_t>(size);
    const uint32_t key = is_inside ? keys[i] : 0;
    const uint32_t behind = key > first ? first : key;
    second = behind > second ? behind : second;
    first = key > first ? key : first;
  }
  const uint32_t largest = warp_max(first);
  const uint32_t lanes = ptx::vote_ballot(first == largest);
  const bool has_largest = (lanes & (0u - lanes)) >> lane & 1;  // the first lane that has it
  return {largest, warp_max(has_largest ? second : first)};
}

// Sets the keys of experts in dropped groups to 0.
template <int kPerLane>
__device__ __forceinline__ void drop_groups(const RouteParams& params, uint32_t (&keys)[kPerLane]) {
  const int lane = ptx::lane_index();
  const int group_size = params.experts / params.groups;
  const bool adds_two = params.scoring == Scoring::kSigmoid && group_size > 1;
  uint32_t group_key = 0;  // lane g: key of group g
#pragma unroll 1
  for (int group = 0; group < params.groups; ++group) {
    const TwoKeys best = best_two(keys, group * group_size, group_size);
    uint32_t key = best.first;
    if (adds_two) key = order_key(key_value(best.first) + key_value(best.second));
    if (lane == group) group_key = key;
  }
  uint32_t selected = 0;
#pragma unroll 1
  for (int i = 0; i < params.topk_groups; ++i) {
    const uint32_t lanes = ptx::vote_ballot(group_key == warp_max(group_key));
    const uint32_t group = lanes & (0u - lanes);  // as a bit; the first among equals
    selected |= group;
    if (group >> lane & 1) group_key = 0;
  }
#pragma unroll 1
  for (int group = 0; group < params.groups; ++group) {
    if (selected >> group & 1) continue;
    const int begin = group * group_size, end = begin + group_size;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = 32 * i + lane;
      if (expert >= begin && expert < end) keys[i] = 0;
    }
  }
}

// exp(logit - largest) / sum is a softmax score.
struct Softmax {
  float largest, inverse_sum;

  __device__ __forceinline__ float score(float logit) const {
    return ptx::exp2_approx((logit - largest) * kLog2e) * inverse_sum;
  }
};

// logits: raw bits.
template <int kPerLane>
__device__ __forceinline__ Softmax softmax_over(const uint32_t (&logits)[kPerLane], int experts) {
  float largest = ptx::negative_infinity(), sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (32 * i + ptx::lane_index() < experts) {
      largest = ptx::max_ftz(largest, ptx::bits_float(logits[i]));
    }
  }
  largest = warp_max(largest);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (32 * i + ptx::lane_index() < experts) {
      sum += ptx::exp2_approx((ptx::bits_float(logits[i]) - largest) * kLog2e);
    }
  }
  return {largest, 1.0f / warp_sum(sum)};
}

// Turns the bits of logits into the keys that decide the choice. Softmax and sigmoid increase with the logit, so
// without bias and groups the logits decide: scores that round to the same number do not make a tie.
template <int kPerLane>
__device__ __forceinline__ void make_keys(const RouteParams& params, const Softmax& softmax,
                                          uint32_t (&keys)[kPerLane]) {
  constexpr int kLoads = 4;  // loads of the bias in flight
  const bool by_score = params.bias != nullptr || params.groups > 1;
#pragma unroll
  for (int start = 0; start < kPerLane; start += kLoads) {
    float bias[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int expert = 32 * (start + i) + ptx::lane_index();
      bias[i] = params.bias != nullptr && expert < params.experts ? ptx::ld_global_float(params.bias + expert) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int expert = 32 * (start + i) + ptx::lane_index();
      float value = ptx::bits_float(keys[start + i]);
      if (by_score && params.scoring == Scoring::kSoftmax) value = softmax.score(value);
      if (by_score && params.scoring == Scoring::kSigmoid) value = sigmoid(value);
      keys[start + i] = expert < params.experts ? order_key(value + bias[i]) : 0;  // -0 + 0 is 0
    }
  }
}

// The weight of this lane's choice; 0 in lanes without one.
__device__ __forceinline__ float choice_weight(const RouteParams& params, const Softmax& softmax, int64_t row,
                                               int expert, bool has_choice) {
  float weight = 0.0f;
  if (has_choice) {
    const float logit = float_of_bits(load_bits(params.logits, row + expert, params.logits_dtype), params.logits_dtype);
    if (params.scoring == Scoring::kSoftmax) weight = softmax.score(logit);
    if (params.scoring == Scoring::kSigmoid) weight = sigmoid(logit);
    if (params.scoring == Scoring::kTopkSoftmax) {
      weight = params.bias != nullptr ? logit + ptx::ld_global_float(params.bias + expert) : logit;
    }
  }
  if (params.scoring == Scoring::kTopkSoftmax) {
    const float largest = ptx::shuffle_index(weight, 0);
    weight = has_choice ? ptx::exp2_approx((weight - largest) * kLog2e) : 0.0f;
    weight = weight / warp_sum(weight);
  } else if (params.renormalize) {
    weight = weight / (warp_sum(weight) + kSmallestSum);
  }
  return weight * params.scale;
}

// The bits of this lane's logits, converted to float.
template <int kPerLane>
__device__ __forceinline__ void load_logits(const RouteParams& params, int64_t row, uint32_t (&logits)[kPerLane]) {
  if (params.logits_dtype == Scalar::kFloat32) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = 32 * i + ptx::lane_index();
      logits[i] = expert < params.experts ? load_bits(params.logits, row + expert, Scalar::kFloat32) : 0;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = 32 * i + ptx::lane_index();
    logits[i] = expert < params.experts ? load_bits(params.logits, row + expert, Scalar::kFloat16) : 0;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    logits[i] = ptx::float_bits(float_of_bits(logits[i], params.logits_dtype));
  }
}

// counts_smem: the counts of this warp.
template <int kPerLane>
__device__ __forceinline__ void route_token(const RouteParams& params, int64_t token, ptx::SmemPointer counts_smem) {
  const int lane = ptx::lane_index();
  const int64_t row = token * params.logits_stride;
  uint32_t keys[kPerLane];  // at first the bits of the logits
  load_logits(params, row, keys);
  Softmax softmax{0.0f, 1.0f};
  if (params.scoring == Scoring::kSoftmax) softmax = softmax_over(keys, params.experts);
  make_keys(params, softmax, keys);
  if (params.groups > 1) drop_groups(params, keys);

  int expert = 0;
#pragma unroll 1
  for (int choice = 0; choice < params.top_k; ++choice) {
    const Best best = best_of_all(keys);
    if (lane == choice) expert = best.index;
    const int taken = best.index % 32 == lane ? best.index / 32 : -1;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) keys[i] = i == taken ? 0 : keys[i];
  }
  const bool has_choice = lane < params.top_k;
  const float weight = choice_weight(params, softmax, row, expert, has_choice);
  if (has_choice) {
    ptx::st_global_float(params.weights + token * params.top_k + lane, weight);
    ptx::st_global_32(params.ids + token * params.top_k + lane, static_cast<uint32_t>(expert));
    // A token's choices differ, so no two lanes update the same count.
    const ptx::SmemPointer count_smem = counts_smem + 4 * expert;
    ptx::st_shared_32(count_smem, ptx::ld_shared_32(count_smem) + 1);
  }
  ptx::warp_sync();  // the next token's lanes, or the sum over warps, read these counts
}

template <typename Spec>
__device__ __forceinline__ void route(const RouteParams& params) {
  const int warp = ptx::warp_index();
  const ptx::SmemPointer block_smem = ptx::dynamic_shared_memory();
  const ptx::SmemPointer counts_smem = block_smem + 4 * kMaxExperts * warp;
  for (int expert = ptx::lane_index(); expert < params.experts; expert += 32) {
    ptx::st_shared_32(counts_smem + 4 * expert, 0);
  }
  ptx::warp_sync();  // zeros before the first token's counts
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int64_t step = static_cast<int64_t>(ptx::grid_size()) * Spec::kNumWarps;
  int64_t token = static_cast<int64_t>(ptx::block_index()) * Spec::kNumWarps + warp;
  for (; token < params.tokens; token += step) {
    if (params.experts <= 128) {
      route_token<4>(params, token, counts_smem);
    } else if (params.experts <= 256) {
      route_token<8>(params, token, counts_smem);
    } else if (params.experts <= 512) {
      route_token<16>(params, token, counts_smem);
    } else {
      route_token<32>(params, token, counts_smem);
    }
  }
  ptx::barrier_sync_block();  // all warps have counted
  for (int expert = ptx::thread_index(); expert < params.experts; expert += Spec::kNumThreads) {
    uint32_t count = 0;
    for (int i = 0; i < Spec::kNumWarps; ++i) count += ptx::ld_shared_32(block_smem + 4 * (kMaxExperts * i + expert));
    // Integer sums: the order of blocks does not matter.
    if (count != 0) ptx::atomic_add_global(params.counts + expert, static_cast<int32_t>(count));
  }
}

}  // namespace flashmoe::moe
