// Memory layouts of an expert's weights, B [n, k].
#pragma once

namespace flashmoe::moe {

enum class Weights {
  kNk,       // [experts, n, k]
  kKn,       // [experts, k, n]
  kKnPairs,  // as kKn, with the columns of gate and up interleaved
};

}  // namespace flashmoe::moe
