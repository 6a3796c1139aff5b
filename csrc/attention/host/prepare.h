// Turns the operator's arguments into what a kernel can work on: the parameter block, copies of tensors that it cannot
// load, tensor maps.
#pragma once

#include <cuda.h>

#include <array>

#include "attention/forward/sm90/tensor_map.h"
#include "attention/host/arguments.h"
#include "host/tensor_map.h"

namespace flashmoe::attention {

// What a kernel is launched with. It may differ from the caller's request, as long as the result is the same.
struct Problem {
  ForwardParams params;
  Mask mask;
};

// A single query row sees every key, so with grouped heads the query heads of one key head become the rows of one tile:
// its keys are read once instead of once per query head.
Problem make_problem(const ForwardArguments& arguments, const ForwardOutputs& outputs);

// Returns whether the kernel can use these tensors without copies, and this scale.
bool runs_in_place(const ForwardArguments& arguments, const Kernel& kernel);

// The same problem on tensors that the kernel can load, with a scale that it supports.
struct Operands {
  ForwardArguments arguments;
  ForwardOutputs outputs;
};
Operands make_operands(const ForwardArguments& arguments, const ForwardOutputs& outputs, const Kernel& kernel);

// Copies the output to the caller's tensor, unless it was written there.
void return_outputs(const Operands& operands, const ForwardOutputs& outputs);

// For q, k, v and the output; a kernel that streams a mask has the mask's map after them.
using TensorMaps = std::array<CUtensorMap, 5>;
template <class Maps>
TensorMaps encode(const Maps& maps, Dtype dtype, CUtensorMapL2promotion of_keys = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  return {host::encode_tensor_map(maps.q, dtype, "q"), host::encode_tensor_map(maps.k, dtype, "k", of_keys),
          host::encode_tensor_map(maps.v, dtype, "v", of_keys), host::encode_tensor_map(maps.out, dtype, "out"),
          CUtensorMap{}};
}

}  // namespace flashmoe::attention
