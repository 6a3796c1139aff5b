// Building blocks for lists of kernels: each object prepares one kernel, or the sort's two, and adds it to a list. It
// must live until the list has run.
//
// Every kernel waits for the end of the previous one before its first access to anything that the list writes, so each
// may be launched early behind the previous one, whichever one it depends on. The previous one has waited in the same
// way, so all earlier kernels of the list have ended: a kernel may write where any of them has read. Exceptions, which
// read what the sort wrote before they wait: moe_combine, and plain products for few rows or with
// overlaps_previous_grid
// (moe/params/scaled.h). A product lets the next kernel begin only when its own wait is over, so the sort has ended by
// then.
#pragma once

#include <cuda.h>

#include <array>
#include <optional>

#include "host/launch.h"
#include "host/tile_counters.h"
#include "host/workspace.h"
#include "moe/host/arguments.h"
#include "moe/host/prepare.h"
#include "moe/host/select.h"
#include "moe/params/mxfp4.h"
#include "moe/params/scaled.h"

namespace flashmoe::moe {

// One call's list, and what its kernels share.
class CallList {
 public:
  explicit CallList(const host::CudaCall& call) : call_(call) {}

  const host::CudaCall& call() const { return call_; }
  bool is_empty() const { return is_empty_; }
  void add(const Kernel& kernel, int64_t grid, const void* params, bool is_dependent = true,
           const CUtensorMap* maps = nullptr) {
    list_.add({&kernel, grid, params, maps, is_dependent});
    is_empty_ = false;
  }
  // For a persistent kernel with more tiles than the GPU holds; acquired on first use.
  int32_t* tile_counter() {
    if (!counter_.has_value()) counter_ = host::tile_counter(call_);
    return counter_->address;
  }
  void run() { list_.run(call_); }

 private:
  const host::CudaCall& call_;
  host::LaunchList list_;
  std::optional<host::TileCounter> counter_;
  bool is_empty_ = true;
};

// The sort's results, among the other temporaries of a call.
class SortedWorkspace {
 public:
  SortedWorkspace(host::Workspace& workspace, int64_t slots, int64_t experts);
  Sorted pointers(const host::Workspace& workspace) const;

 private:
  int64_t expert_offsets_, row_slots_, slot_rows_, row_weights_;
};

// moe_combine or moe_combine_backward. With few tokens, several blocks share a token's columns.
void add_combine(CallList& list, const Kernel& kernel, const CombineParams& params, bool is_dependent = true);

class SortKernels {
 public:
  // Adds its own temporary to `workspace`.
  SortKernels(const SortArguments& arguments, const host::KernelRequest& request, host::Workspace& workspace);
  // Call after the workspace is allocated.
  void add(CallList& list, const Sorted& sorted, const host::Workspace& workspace);

  const char* symbol() const { return kernels_[0]->symbol; }

 private:
  const SortArguments& arguments_;
  SortParams params_{};
  int64_t blocks_;
  int64_t block_counts_;
  std::array<const Kernel*, 2> kernels_{};
};

// The sizes of a weight gradient [experts, n, k], by which its kernel is chosen.
inline ExpertWeights sizes_of(const Tensor& gradient) {
  ExpertWeights sizes;
  sizes.n = gradient.sizes()[1];
  sizes.k = gradient.sizes()[2];
  return sizes;
}

// One product of each expert's rows. `Params`: GemmParams, ScaledGemmParams for e4m3 operands, or Mxfp4GemmParams.
template <class Params>
class GroupedProduct {
 public:
  GroupedProduct(Product product, const Kernel& kernel) : product_(product), kernel_(&kernel) {}

  Params params{};  // to be filled in, except tile_counter

  const Kernel& kernel() const { return *kernel_; }

  void add(CallList& list, bool is_dependent = true);

 private:
  static constexpr std::size_t kMaxMaps = 5;

  Product product_;
  const Kernel* kernel_;
  std::array<CUtensorMap, kMaxMaps> maps_{};
};
using GroupedGemm = GroupedProduct<GemmParams>;
using ScaledGemm = GroupedProduct<ScaledGemmParams>;
using Mxfp4Gemm = GroupedProduct<Mxfp4GemmParams>;

// Chooses the kernel for at most `slots` rows and sets the weights; for a weight gradient only the sizes matter.
GroupedGemm make_gemm(Product product, const host::KernelRequest& request, const ExpertWeights& weights,
                      bool is_interleaved, int64_t slots, int64_t experts);

// Lets a gated product for few rows request weights by the experts of the slots before the sort has ended.
void set_early_ids(GemmParams& params, const SortArguments& routing, const host::Device& gpu);

}  // namespace flashmoe::moe
