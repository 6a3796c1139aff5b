// How the weights of an expert, B [n, k], lie in memory.
#pragma once

namespace flashmoe::moe {

enum class Weights {
  kNk,       // [experts, n, k]
  kKn,       // [experts, k, n]
  kKnPairs,  // as kKn, the columns of gate and up interleaved
};

}  // namespace flashmoe::moe
