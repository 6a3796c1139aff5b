// The operator of the layer with e4m3 weights, for GPUs.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace flashmoe {
namespace moe {

void boxed_scaled(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs);

}  // namespace moe
}  // namespace flashmoe
