// The parts that lists of kernels are made of: each prepares one kernel, or the sort's two, and adds it to a list. A part must
// live until the list has run.
//
// Every kernel waits for the end of the one before it before its first access to what any of the list writes, so each may be
// scheduled early behind the one before it, whichever it depends on. As that one has waited in its turn, all of the list in front
// has ended: a kernel may write where any of them has read. One exception: a plain product for few rows reads the sort's offsets before
// it waits, so what stands between the two must not let it begin before the sort has ended (may_follow).
#pragma once

#include <cuda.h>

#include <array>
#include <optional>

#include "host/launch.h"
#include "host/tile_counters.h"
#include "host/workspace.h"
#include "moe/host/arguments.h"
#include "moe/host/select.h"

namespace flashmoe {
namespace moe {

// What moe_sort writes, in tensors or in a workspace.
struct Sorted {
  int32_t* expert_offsets;  // [experts + 1]
  int32_t* row_slots;       // [slots]
  int32_t* slot_rows;       // [slots]
  float* row_weights;       // [slots]
};
Sorted pointers_of(const SortOutputs& sorted);

// Room for the sort's results beside the other temporaries of a call.
class SortedRoom {
 public:
  SortedRoom(host::Workspace& workspace, int64_t slots, int64_t experts);
  Sorted pointers(const host::Workspace& workspace) const;

 private:
  int64_t expert_offsets_, row_slots_, slot_rows_, row_weights_;
};

// Blocks of moe_combine or moe_combine_backward. Few tokens share a token's columns out among blocks.
int64_t combine_grid(const Kernel& kernel, int64_t tokens, int64_t columns, int32_t num_multiprocessors);

// out = shared + the weighted sum of each token's rows; `shared` without a handle: none.
CombineParams combine_params(const LayerShape& shape, const Sorted& sorted, const Tensor& shared, const Tensor& out,
                             const void* rows);

class SortPart {
 public:
  // Adds its own temporary to `workspace`.
  SortPart(const SortArguments& arguments, const host::KernelRequest& request, host::Workspace& workspace);
  // Once the workspace is allocated.
  void add(host::LaunchList& list, const Sorted& sorted, const host::Workspace& workspace);

  const char* symbol() const { return kernels_[0]->symbol; }

 private:
  SortParams params_{};
  int64_t blocks_;
  int64_t block_counts_;
  std::array<const Kernel*, 2> kernels_{};
};

// Of a gradient of weights [experts, n, k] what the choice of its kernel looks at.
inline ExpertWeights sizes_of(const Tensor& gradient) {
  ExpertWeights sizes;
  sizes.n = gradient.sizes()[1];
  sizes.k = gradient.sizes()[2];
  return sizes;
}

// One grouped product.
class ProductPart {
 public:
  // Chooses the kernel; of the weight gradient's `weights` only the sizes count.
  ProductPart(Product product, const host::KernelRequest& request, const ExpertWeights& weights, bool is_paired,
              int64_t slots, int64_t experts);

  GemmParams params{};  // to be filled in, but for tile_counter

  const Kernel& kernel() const { return *kernel_; }

  // Whether the gated product `front`, which stands right behind the sort, may let this one begin early.
  bool may_follow(const ProductPart& front) const {
    return !is_for_few_rows(*kernel_) || is_for_few_rows(*front.kernel_);
  }

  // `counter`: of the call, taken on first use.
  void add(host::LaunchList& list, bool is_dependent, const host::CudaCall& call,
           std::optional<host::TileCounter>& counter);

 private:
  static constexpr std::size_t kMaxMaps = 5;

  int64_t bound_on_tiles() const;

  Product product_;
  const Kernel* kernel_;
  std::array<CUtensorMap, kMaxMaps> maps_{};
};

}  // namespace moe
}  // namespace flashmoe
