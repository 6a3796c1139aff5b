// A key of the FP8 cache, 656 bytes: 512 values (e4m3), a float32 scale per 128 of them, 64 rotary values of 16 bits.
#pragma once

namespace flashmoe::mla {

constexpr int kScaleColumns = 128;  // columns per scale
constexpr int kScaleBytesOffset = 512;
constexpr int kRotaryBytesOffset = kScaleBytesOffset + 512 / kScaleColumns * 4;
constexpr int kFp8KeyBytes = kRotaryBytesOffset + 64 * 2;

}  // namespace flashmoe::mla
