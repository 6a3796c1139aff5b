// Choosing experts and sorting by them: plain loops, a small part of the layer's time.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "moe/cpu/moe.h"

namespace flashmoe::cpu {
namespace {

using moe::Scalar;
using moe::Scoring;

float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t{bits} >> 15 << 31, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 0) return std::ldexp(static_cast<float>(fraction), -24) * (sign == 0 ? 1.0f : -1.0f);
  const uint32_t word = sign | (exponent == 31 ? 0xff : exponent + 112) << 23 | fraction << 13;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

float load_float(const void* data, Scalar type, int64_t index) {
  if (type == Scalar::kFloat32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  if (type == Scalar::kFloat16) return half_to_float(bits);
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

int64_t load_id(const void* data, Scalar type, int64_t index) {
  return type == Scalar::kInt32 ? static_cast<const int32_t*>(data)[index] : static_cast<const int64_t*>(data)[index];
}

// The expert of this layer for a slot, or -1.
int32_t expert_of(const moe::SortParams& params, int64_t slot) {
  const int64_t id = load_id(params.ids, params.ids_dtype, slot);
  if (id < 0 || id >= params.ids_end) return -1;
  const int64_t expert = params.expert_map == nullptr ? id : params.expert_map[id];
  return expert >= 0 && expert < params.experts ? static_cast<int32_t>(expert) : -1;
}

// The larger score first, ties by the lower id; NaN counts as the largest, as in torch.topk.
bool comes_before(const float* scores, int32_t a, int32_t b) {
  const float x = scores[a], y = scores[b];
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && (!std::isnan(y) || a < b);
  return x > y || (x == y && a < b);
}

void take_largest(const float* scores, int32_t count, int32_t wanted, std::vector<int32_t>* order) {
  order->resize(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) (*order)[static_cast<size_t>(i)] = i;
  std::partial_sort(order->begin(), order->begin() + wanted, order->end(),
                    [scores](int32_t a, int32_t b) { return comes_before(scores, a, b); });
}

struct RouteScratch {
  std::vector<float> logits, scores, choice, group_scores;
  std::vector<int32_t> order, groups;
};

// x = softmax(x).
void softmax(float* x, int32_t count) {
  float largest = -std::numeric_limits<float>::infinity(), sum = 0.0f;
  for (int32_t i = 0; i < count; ++i) largest = x[i] > largest || std::isnan(x[i]) ? x[i] : largest;
  for (int32_t i = 0; i < count; ++i) sum += x[i] = std::exp(x[i] - largest);
  for (int32_t i = 0; i < count; ++i) x[i] /= sum;
}

// Sets the choice scores of experts outside the best groups to -inf. A group's score is the sum of its two largest
// scores if the scoring is sigmoid, else its largest.
void keep_best_groups(const moe::RouteParams& params, RouteScratch* scratch) {
  const int32_t size = params.experts / params.groups;
  const bool has_two = params.scoring == Scoring::kSigmoid && size > 1;
  scratch->group_scores.resize(static_cast<size_t>(params.groups));
  for (int32_t group = 0; group < params.groups; ++group) {
    const float* scores = scratch->choice.data() + group * size;
    take_largest(scores, size, std::min(2, size), &scratch->order);
    scratch->group_scores[static_cast<size_t>(group)] =
        scores[scratch->order[0]] + (has_two ? scores[scratch->order[1]] : 0.0f);
  }
  take_largest(scratch->group_scores.data(), params.groups, params.topk_groups, &scratch->groups);
  std::vector<bool> stays(static_cast<size_t>(params.groups), false);
  for (int32_t i = 0; i < params.topk_groups; ++i)
    stays[static_cast<size_t>(scratch->groups[static_cast<size_t>(i)])] = true;
  for (int32_t expert = 0; expert < params.experts; ++expert) {
    if (stays[static_cast<size_t>(expert / size)]) continue;
    scratch->choice[static_cast<size_t>(expert)] = -std::numeric_limits<float>::infinity();
  }
}

void route_token(const moe::RouteParams& params, int64_t token, RouteScratch* scratch) {
  const size_t experts = static_cast<size_t>(params.experts);
  scratch->scores.resize(experts);
  scratch->choice.resize(experts);
  float* scores = scratch->scores.data();
  for (int32_t i = 0; i < params.experts; ++i) {
    scores[i] = load_float(params.logits, params.logits_dtype, token * params.logits_stride + i);
    if (params.scoring == Scoring::kSigmoid) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
    if (params.scoring == Scoring::kTopkSoftmax && params.bias != nullptr) scores[i] += params.bias[i];
  }
  if (params.scoring == Scoring::kSoftmax) softmax(scores, params.experts);
  std::copy(scores, scores + experts, scratch->choice.begin());  // assigning the vector would need GLIBCXX_3.4.29
  if (params.scoring != Scoring::kTopkSoftmax && params.bias != nullptr) {
    for (size_t i = 0; i < experts; ++i) scratch->choice[i] += params.bias[i];
  }
  if (params.groups > 1) keep_best_groups(params, scratch);
  take_largest(scratch->choice.data(), params.experts, params.top_k, &scratch->order);
  float* weights = params.weights + token * params.top_k;
  int32_t* ids = params.ids + token * params.top_k;
  float sum = 0.0f;
  for (int32_t i = 0; i < params.top_k; ++i) {
    ids[i] = scratch->order[static_cast<size_t>(i)];
    weights[i] = scores[ids[i]];
  }
  if (params.scoring == Scoring::kTopkSoftmax) softmax(weights, params.top_k);
  for (int32_t i = 0; i < params.top_k; ++i) sum += weights[i];
  for (int32_t i = 0; i < params.top_k; ++i) {
    if (params.renormalize) weights[i] /= sum;
    weights[i] *= params.scale;
  }
}

}  // namespace

void moe_sort(const moe::SortParams& params) {
  std::vector<int32_t> next(static_cast<size_t>(params.experts) + 1, 0);
  for (int64_t slot = 0; slot < params.slots; ++slot) {
    const int32_t expert = expert_of(params, slot);
    if (expert >= 0) ++next[static_cast<size_t>(expert) + 1];
  }
  for (size_t i = 1; i < next.size(); ++i) next[i] += next[i - 1];
  std::copy(next.begin(), next.end(), params.expert_offsets);
  for (int64_t slot = 0; slot < params.slots; ++slot) {
    const int32_t expert = expert_of(params, slot);
    const int32_t row = expert < 0 ? -1 : next[static_cast<size_t>(expert)]++;
    params.slot_rows[slot] = row;
    if (row < 0) continue;
    params.row_slots[row] = static_cast<int32_t>(slot);
    params.row_weights[row] = load_float(params.topk_weights, params.weights_dtype, slot);
  }
  const int32_t rows = params.expert_offsets[params.experts];
  std::fill(params.row_slots + rows, params.row_slots + params.slots, -1);
  std::fill(params.row_weights + rows, params.row_weights + params.slots, 0.0f);
}

void moe_route(const moe::RouteParams& params) {
  RouteScratch scratch;
  std::fill(params.counts, params.counts + params.experts, 0);
  for (int64_t token = 0; token < params.tokens; ++token) {
    route_token(params, token, &scratch);
    for (int32_t i = 0; i < params.top_k; ++i) ++params.counts[params.ids[token * params.top_k + i]];
  }
}

}  // namespace flashmoe::cpu
