// Dropout on the CPU: the factors of a block of probabilities (attention/params/dropout.h lists what they depend on).
// Internal linkage.
#pragma once

#include <cstdint>

#include "attention/params/dropout.h"

namespace flashmoe::cpu {
namespace {

struct PhiloxWords {
  uint32_t word[4];
};

inline PhiloxWords philox(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 7; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * counter.word[0];
    const uint64_t product1 = uint64_t{kMultiplier1} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

class DropoutFactors {
 public:
  DropoutFactors(const attention::Dropout& dropout, int32_t sequence, int32_t head)
      : dropout_(dropout), sequence_(static_cast<uint32_t>(sequence)), head_(static_cast<uint32_t>(head)) {
    const auto seed = static_cast<uint64_t>(dropout.rng_state[0]), offset = static_cast<uint64_t>(dropout.rng_state[1]);
    const PhiloxWords words = philox({{static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), 0, 0}},
                                     static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    key0_ = words.word[0];
    key1_ = words.word[1];
    start_ = words.word[2] + head_ * 0xA0F2EC75 + sequence_ * 0x89E18285;
  }

  // factors[i * row_stride + j * key_stride] for row + i and key + j, i < rows and j < keys.
  void fill(int32_t row, int32_t rows, int32_t key, int32_t keys, int64_t row_stride, int64_t key_stride,
            float* factors) const {
    for (int64_t own_row = row / 16 * 16; own_row < int64_t{row} + rows; own_row += own_row % 8 == 7 ? 9 : 1) {
      for (int64_t own_key = key / 32 * 32; own_key < int64_t{key} + keys; own_key += own_key % 8 == 6 ? 26 : 2) {
        const auto key_group = static_cast<uint32_t>(own_key / 32 * 4 + own_key % 8 / 2);
        const auto row_group = static_cast<uint32_t>(own_row / 16 * 8 + own_row % 8);
        const PhiloxWords words = philox({{key_group, head_, row_group, sequence_}}, key0_, key1_);
        const uint32_t point = start_ + row_group * 0xDB4F0B91 + key_group * 0xBBE05633;
        const auto threshold = static_cast<uint32_t>(dropout_.threshold);
        const uint32_t limit = threshold / 256 + (point < threshold << 24 ? 1 : 0);
        for (int index = 0; index < 16; ++index) {  // word index / 4, byte index % 4
          const int64_t i = own_row + index % 2 * 8 - row;
          const int64_t j = own_key + index / 8 * 16 + index / 2 % 2 * 8 + index / 4 % 2 - key;
          if (i < 0 || i >= rows || j < 0 || j >= keys) continue;
          const uint32_t value = words.word[index / 4] >> index % 4 * 8 & 0xFF;
          factors[i * row_stride + j * key_stride] = value < limit ? 0.0f : dropout_.scale;
        }
      }
    }
  }

 private:
  const attention::Dropout& dropout_;
  const uint32_t sequence_;
  const uint32_t head_;
  uint32_t key0_;
  uint32_t key1_;
  uint32_t start_;  // of the lattice, for this sequence and head
};

}  // namespace
}  // namespace flashmoe::cpu
