// Flags of ForwardParams::hints for chunk kernels; the host passes their sum. (As members of params/forward.h each
// would be a word of every kernel's parameters.)
#pragma once

namespace flashmoe::attention::sm90 {

constexpr int kReadsKeysOnce = 1;  // keys are read evict_first; otherwise evict_last
constexpr int kStartsNext = 2;     // the next kernel may be scheduled while this one runs

}  // namespace flashmoe::attention::sm90
