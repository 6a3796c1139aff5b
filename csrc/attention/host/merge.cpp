// Merges attention over two sets of keys on a GPU, from the results for each: checks and the launch. The CPU version is
// flashmoe/attn/merge.py.

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>

#include "attention/host/arguments.h"
#include "attention/host/select.h"
#include "attention/params/merge.h"
#include "host/arguments.h"
#include "host/copies.h"
#include "host/last_kernel.h"
#include "host/launch.h"

namespace flashmoe::attention {
namespace {

constexpr int64_t kLaneColumns = 16;

struct MergeArguments {
  Tensor out_a, lse_a, out_b, lse_b, out, lse;  // [B, H, S, D] and [B, H, S], or [N, H, D] and [H, N]
  Dtype dtype = Dtype::kFloat16;                // of out_b; also of out_a and out, unless these are float32

  bool is_ragged() const { return out_b.dim() == 3; }
  int64_t size(int64_t axis) const { return out_b.sizes()[axis]; }
  int64_t batch() const { return is_ragged() ? 1 : size(0); }
  int64_t heads() const { return size(1); }
  int64_t rows() const { return is_ragged() ? size(0) : size(2); }
  int64_t head_dim() const { return size(out_b.dim() - 1); }
};

MergeArguments parse_merge(host::Arguments& given) {
  MergeArguments a;
  given.tensors(a.out_a, a.lse_a, a.out_b, a.lse_b, a.out, a.lse);
  QueryKeyValue part;
  part.q = host::alias(a.out_b);
  part.k = host::alias(a.out_b);
  part.v = host::alias(a.out_b);
  check_operands(part);
  a.dtype = part.dtype;
  const int64_t rank = a.out_b.dim();
  check_layout(a.out_b, "out_b", a.is_ragged() ? Layout{"[tokens, heads, head_dim]", 3} : kDenseLayout);
  const std::array<int64_t, 3> rows =
      a.is_ragged() ? std::array<int64_t, 3>{a.heads(), a.rows()} : std::array{a.batch(), a.heads(), a.rows()};
  const auto check = [&](const Tensor& tensor, const char* name, int32_t dtype, const int64_t* sizes,
                         int64_t its_rank) {
    check_companion(tensor, name, part, dtype, its_rank);
    if (std::equal(sizes, sizes + its_rank, tensor.sizes())) return;
    host::violate(
        "attention.backward_shape",
        {{"name", name}, {"needed", host::describe_sizes(sizes, its_rank)}, {"found", host::describe_sizes(tensor)}});
  };
  const int32_t float32 = aoti_torch_dtype_float32();
  const int32_t sums = a.out.dtype() == float32 ? float32 : part.torch_dtype;
  for (const auto& [tensor, name, dtype] :
       {std::tuple(&a.out_a, "out_a", sums), std::tuple(&a.out_b, "out_b", part.torch_dtype),
        std::tuple(&a.out, "out", sums)}) {
    check(*tensor, name, dtype, a.out_b.sizes(), rank);
  }
  for (const auto& [tensor, name] :
       {std::pair(&a.lse_a, "lse_a"), std::pair(&a.lse_b, "lse_b"), std::pair(&a.lse, "lse")}) {
    check(*tensor, name, float32, rows.data(), rank - 1);
  }
  if (a.batch() * a.heads() * a.rows() > std::numeric_limits<int32_t>::max()) {
    host::violate("tensor.size", {{"name", "lse_a as one dimension"}, {"sizes", host::describe_sizes(a.lse_a)}});
  }
  if (a.head_dim() < 1 || a.head_dim() > kMaxHeadDim) {
    host::violate("attention.head_dim", {{"name", "out_b"}, {"head_dim", a.head_dim()}, {"most", kMaxHeadDim}});
  }
  return a;
}

// A log-sum-exp has no columns: its last dimension is the rows.
Strides row_strides(const Tensor& lse) {
  const int64_t* strides = lse.strides();
  return lse.dim() == 2 ? Strides{0, strides[0], strides[1]} : Strides{strides[0], strides[1], strides[2]};
}

void merge_cuda(const MergeArguments& a) {
  const host::Device& gpu = host::device(a.out_b.device_index());
  const Kernel& kernel = select_first(host::make_request(gpu, a.dtype), "attention_merge", "merging two results");
  const Tensor out_a = host::loadable(a.out_a, kernel), out_b = host::loadable(a.out_b, kernel);
  const bool is_in_place = host::is_loadable(a.out, kernel);
  const Tensor out = is_in_place ? host::alias(a.out) : host::empty_like(a.out, host::padded_sizes(a.out));
  MergeParams params{};
  params.out_a = out_a.data();
  params.out_b = out_b.data();
  params.out = out.data();
  params.lse_a = static_cast<const float*>(a.lse_a.data());
  params.lse_b = static_cast<const float*>(a.lse_b.data());
  params.lse = static_cast<float*>(a.lse.data());
  params.out_a_stride = strides_of(out_a);
  params.out_b_stride = strides_of(out_b);
  params.out_stride = strides_of(out);
  params.lse_a_stride = row_strides(a.lse_a);
  params.lse_b_stride = row_strides(a.lse_b);
  params.lse_stride = row_strides(a.lse);
  params.batch = static_cast<int32_t>(a.batch());
  params.heads = static_cast<int32_t>(a.heads());
  params.rows = static_cast<int32_t>(a.rows());
  params.head_dim = static_cast<int32_t>(out_b.sizes()[out_b.dim() - 1]);
  while (kLaneColumns << params.lanes_shift < params.head_dim) ++params.lanes_shift;
  params.is_float = a.out.dtype() != a.out_b.dtype() ? 1 : 0;
  const int64_t rows = a.batch() * a.heads() * a.rows(), block_rows = kernel.threads >> params.lanes_shift;
  const host::CudaCall call(gpu);
  host::LaunchList list;
  list.add({&kernel, (rows + block_rows - 1) / block_rows, &params, nullptr, /*is_dependent=*/false});
  list.run(call);
  if (!is_in_place) host::copy_unpadded(out, a.out);
  host::set_last_kernel(kernel.symbol);
}

void boxed_merge(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_attention_merge", num_arguments, 6, num_outputs, 0);
  host::Arguments given(stack);
  const MergeArguments arguments = parse_merge(given);
  if (arguments.batch() > 0 && arguments.heads() > 0 && arguments.rows() > 0) merge_cuda(arguments);
}

}  // namespace
}  // namespace flashmoe::attention

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) {
  library.def(
      "_attention_merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) {
  library.impl("_attention_merge", &flashmoe::attention::boxed_merge);
}
