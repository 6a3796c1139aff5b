// Emulated: the signatures of csrc/ptx/shuffle.cuh plus the call site; a test compares the two.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ float shuffle_xor(float value, int lane_mask, Site site = Site::here()) {
  return emulation::bits_float(emulation::shuffle_xor(emulation::float_bits(value), lane_mask, site, "shuffle_xor"));
}

__device__ __forceinline__ uint32_t shuffle_xor(uint32_t value, int lane_mask, Site site = Site::here()) {
  return emulation::shuffle_xor(value, lane_mask, site, "shuffle_xor");
}

__device__ __forceinline__ float shuffle_index(float value, int lane, Site site = Site::here()) {
  return emulation::bits_float(emulation::shuffle_index(emulation::float_bits(value), lane, site, "shuffle_index"));
}

__device__ __forceinline__ int shuffle_index(int value, int lane, Site site = Site::here()) {
  return static_cast<int>(emulation::shuffle_index(static_cast<uint32_t>(value), lane, site, "shuffle_index"));
}

__device__ __forceinline__ uint64_t shuffle_index(uint64_t value, int lane, Site site = Site::here()) {
  const auto low = static_cast<uint32_t>(shuffle_index(static_cast<int>(value), lane, site));
  const auto high = static_cast<uint32_t>(shuffle_index(static_cast<int>(value >> 32), lane, site));
  return static_cast<uint64_t>(high) << 32 | low;
}

__device__ __forceinline__ bool vote_any(bool predicate, Site site = Site::here()) {
  return emulation::ballot(predicate, site, "vote_any") != 0;
}

__device__ __forceinline__ bool vote_all(bool predicate, Site site = Site::here()) {
  return emulation::ballot(predicate, site, "vote_all") == 0xffffffffu;
}

__device__ __forceinline__ uint32_t vote_ballot(bool predicate, Site site = Site::here()) {
  return emulation::ballot(predicate, site, "vote_ballot");
}

__device__ __forceinline__ uint32_t reduce_max(uint32_t value, Site site = Site::here()) {
  return emulation::reduce_max(value, site, "reduce_max");
}

__device__ __forceinline__ int32_t reduce_add(int32_t value, Site site = Site::here()) {
  return static_cast<int32_t>(emulation::reduce_add(static_cast<uint32_t>(value), site, "reduce_add"));
}

__device__ __forceinline__ bool elect_one(Site site = Site::here()) { return emulation::elect(site, "elect_one"); }

}  // namespace flashmoe::ptx
