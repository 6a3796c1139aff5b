// What the host tells a chunk's kernel in ForwardParams::hints: a sum of these (in params/forward.h each would be a word of every kernel).
#pragma once

namespace flashmoe::attention::sm90 {

constexpr int kReadsKeysOnce = 1;  // keys are read evict_first; otherwise evict_last
constexpr int kStartsNext = 2;     // the kernel behind may be scheduled while this one runs

}  // namespace flashmoe::attention::sm90
