// From the operator's arguments to what a kernel can work on: the parameter block, copies of what it cannot load, tensor maps.
#pragma once

#include <cuda.h>

#include <array>

#include "attention/forward/sm90/tensor_map.h"
#include "attention/host/arguments.h"
#include "host/tensor_map.h"

namespace flashmoe::attention {

// What a kernel is launched with. It need not be what the caller asked for, as long as the result is the same.
struct Problem {
  ForwardParams params;
  Mask mask;
};

// A single query row sees every key, so with grouped heads the query heads of one key head serve as the rows of one
// tile: its keys are read once instead of once a query head.
Problem make_problem(const ForwardArguments& arguments, const ForwardOutputs& outputs);

// Whether the kernel can work on these tensors where they lie, with this scale.
bool runs_in_place(const ForwardArguments& arguments, const Kernel& kernel);

// The same problem on tensors that the kernel can load, with a scale that it can use.
struct Operands {
  ForwardArguments arguments;
  ForwardOutputs outputs;
};
Operands make_operands(const ForwardArguments& arguments, const ForwardOutputs& outputs, const Kernel& kernel);

// Copies the output to where the caller wants it, unless it was written there.
void return_outputs(const Operands& operands, const ForwardOutputs& outputs);

// Of q, k, v and the output; a kernel that streams a mask has its map behind them.
using TensorMaps = std::array<CUtensorMap, 5>;
template <class Maps>
TensorMaps encode(const Maps& maps, Dtype dtype, CUtensorMapL2promotion of_keys = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  return {host::encode_tensor_map(maps.q, dtype, "q"), host::encode_tensor_map(maps.k, dtype, "k", of_keys),
          host::encode_tensor_map(maps.v, dtype, "v", of_keys), host::encode_tensor_map(maps.out, dtype, "out"),
          CUtensorMap{}};
}

}  // namespace flashmoe::attention
