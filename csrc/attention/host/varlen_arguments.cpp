#include "attention/host/varlen_arguments.h"

#include <algorithm>
#include <limits>
#include <string>

#include "attention/host/varlen_lengths.h"

namespace flashmoe {
namespace attention {
namespace {

using host::describe_device;
using host::describe_dtype;
using host::describe_sizes;
using host::ErrorCode;
using host::fail;

constexpr int64_t kMaxLength = (int64_t{1} << 30) - 1;  // the kernels add windows and lengths in 32 bits
constexpr int64_t kMaxSplits = 32;
// Kernels know tanh to within 7e-7, which the softcap multiplies.
constexpr double kMaxSoftcap = 4096.0;
const char* const kRaggedLayout = "[tokens, heads, head_dim]";
const char* const kDenseLayout = "[batch, heads, length, head_dim]";
const char* const kPageLayout = "[pages, page_size, heads, head_dim]";

std::string describe(const Tensor& tensor) { return describe_sizes(tensor.sizes(), tensor.dim()); }

void check_rank(const Tensor& tensor, const char* name, bool is_ragged, const char* lengths, const char* layout) {
  if (tensor.dim() != (is_ragged ? 3 : 4)) {
    fail(ErrorCode::kShape, name, " has shape ", describe(tensor), "; with", is_ragged ? " " : "out ", lengths,
         " it is ", layout, "; reshape it, or ", is_ragged ? "leave out " : "give ", lengths);
  }
}

void check_memory(const Tensor& tensor, const char* name) {
  const int64_t rank = tensor.dim();
  for (int64_t axis = 0; axis < rank; ++axis) {
    if (tensor.sizes()[axis] > std::numeric_limits<int32_t>::max()) {
      fail(ErrorCode::kShape, name, " has shape ", describe(tensor), "; each size must be below 2^31");
    }
  }
  if (tensor.sizes()[rank - 1] > 1 && tensor.strides()[rank - 1] != 1) {
    fail(ErrorCode::kShape, name, " has stride ", tensor.strides()[rank - 1],
         " in its last dimension; 1 is needed: call .contiguous() on it first");
  }
}

// torch counts a tensor without elements as contiguous, whatever its strides.
bool has_elements(const Tensor& tensor) {
  return std::all_of(tensor.sizes(), tensor.sizes() + tensor.dim(), [](int64_t size) { return size != 0; });
}

// One that goes with q: the same device; a type; contiguous in its last dimension.
void check_companion(const Tensor& tensor, const char* name, const VarlenArguments& arguments, int32_t dtype,
                     int64_t rank) {
  if (tensor.device_type() != arguments.device_type || tensor.device_index() != arguments.device_index) {
    fail(ErrorCode::kDevice, name, " is on ", describe_device(tensor), " and q on ", describe_device(arguments.q),
         "; move it with .to(q.device)");
  }
  if (tensor.dtype() != dtype) {
    fail(ErrorCode::kDtype, name, " is ", describe_dtype(tensor.dtype()), "; ", describe_dtype(dtype),
         " is needed; convert it with .to()");
  }
  if (tensor.dim() != rank) {
    fail(ErrorCode::kShape, name, " has shape ", describe(tensor), "; ", rank, " dimension",
         rank == 1 ? " is" : "s are", " needed");
  }
  if (tensor.sizes()[rank - 1] > 1 && tensor.strides()[rank - 1] != 1 && has_elements(tensor)) {
    fail(ErrorCode::kShape, name, " is not contiguous; call .contiguous() on it first");
  }
}

void check_length(const Tensor& tensor, const char* name, int64_t length, const char* meaning) {
  if (tensor.sizes()[0] != length) {
    fail(ErrorCode::kShape, name, " has ", tensor.sizes()[0], " elements; ", length, " are needed: ", meaning);
  }
}

void check_same_sizes(const Tensor& tensor, const char* name, const int64_t* sizes, int64_t rank) {
  if (!std::equal(sizes, sizes + rank, tensor.sizes())) {
    fail(ErrorCode::kShape, name, " has shape ", describe(tensor), "; ", describe_sizes(sizes, rank),
         " is needed: what the forward pass returned");
  }
}

void check_layouts(const VarlenArguments& arguments) {
  const bool is_ragged = arguments.has_ragged_keys();
  if (is_ragged && arguments.has_pages()) {
    fail(ErrorCode::kArgument, "cu_seqlens_k and block_table are both given; pages take seqused_k for the lengths");
  }
  if (arguments.has_pages() && !VarlenArguments::has(arguments.seqused_k)) {
    fail(ErrorCode::kArgument, "block_table is given without seqused_k; give the number of keys of each sequence");
  }
  check_rank(arguments.q, "q", arguments.has_ragged_rows(), "cu_seqlens_q",
             arguments.has_ragged_rows() ? kRaggedLayout : kDenseLayout);
  const char* key_layout = is_ragged ? kRaggedLayout : arguments.has_pages() ? kPageLayout : kDenseLayout;
  check_rank(arguments.k, "k", is_ragged, "cu_seqlens_k", key_layout);
  check_rank(arguments.v, "v", is_ragged, "cu_seqlens_k", key_layout);
  for (const auto& [tensor, name] :
       {std::pair(&arguments.q, "q"), std::pair(&arguments.k, "k"), std::pair(&arguments.v, "v")}) {
    check_memory(*tensor, name);
  }
}

void check_batch(const VarlenArguments& arguments) {
  const int32_t int32 = aoti_torch_dtype_int32();
  if (arguments.has_ragged_rows()) {
    check_companion(arguments.cu_seqlens_q, "cu_seqlens_q", arguments, int32, 1);
    if (arguments.cu_seqlens_q.sizes()[0] < 1) {
      fail(ErrorCode::kShape, "cu_seqlens_q is empty; it has one element more than there are sequences");
    }
  }
  const int64_t batch = arguments.batch();
  if (arguments.has_ragged_keys()) {
    check_companion(arguments.cu_seqlens_k, "cu_seqlens_k", arguments, int32, 1);
    check_length(arguments.cu_seqlens_k, "cu_seqlens_k", batch + 1, "one more than there are sequences");
  }
  if (VarlenArguments::has(arguments.seqused_k)) {
    check_companion(arguments.seqused_k, "seqused_k", arguments, int32, 1);
    check_length(arguments.seqused_k, "seqused_k", batch, "one for each sequence");
  }
  if (arguments.has_pages()) {
    check_companion(arguments.block_table, "block_table", arguments, int32, 2);
    check_length(arguments.block_table, "block_table", batch, "one row for each sequence");
    if (arguments.k.sizes()[1] < 1) {
      fail(ErrorCode::kShape, "k has shape ", describe(arguments.k), "; a page holds at least one key");
    }
  } else if (!arguments.has_ragged_keys() && arguments.k.sizes()[0] != batch) {
    fail(ErrorCode::kShape, "the batch size differs: k has shape ", describe(arguments.k), ", and there are ", batch,
         " sequences of q; make them equal");
  }
}

void check_sizes(const VarlenArguments& arguments) {
  const Tensor& k = arguments.k;
  const Tensor& v = arguments.v;
  for (int64_t axis = 0; axis + 1 < k.dim(); ++axis) {
    if (k.sizes()[axis] != v.sizes()[axis]) {
      fail(ErrorCode::kShape, "k and v may differ in head_dim alone; found ", describe(k), " and ", describe(v));
    }
  }
  const int64_t head_dim = arguments.head_dim();
  if (k.sizes()[k.dim() - 1] != head_dim) {
    fail(ErrorCode::kShape, "head_dim differs: q has ", describe(arguments.q), ", k has ", describe(k),
         "; make them equal");
  }
  for (const int64_t dim : {head_dim, arguments.head_dim_v()}) {
    if (dim < 1 || dim > kMaxHeadDim) {
      fail(ErrorCode::kShape, "head_dim is ", dim, "; supported: 1 to ", kMaxHeadDim,
           "; use torch's scaled_dot_product_attention for larger heads");
    }
  }
  const int64_t heads_q = arguments.heads_q();
  const int64_t heads_kv = arguments.heads_kv();
  if (heads_kv == 0 ? heads_q != 0 : heads_q % heads_kv != 0) {
    fail(ErrorCode::kShape, "q has ", heads_q, " heads and k has ", heads_kv,
         "; the number of query heads must be a multiple of the number of key heads");
  }
}

void check_max_length(int64_t value, const char* name) {
  if (value < 0 || value > kMaxLength) {
    fail(ErrorCode::kArgument, name, " is ", value, "; supported: 0 to 2^30 - 1; give the longest sequence's length");
  }
}

void check_numbers(const VarlenArguments& arguments) {
  check_max_length(arguments.max_seqlen_q, "max_seqlen_q");
  check_max_length(arguments.max_seqlen_k, "max_seqlen_k");
  for (const int64_t side : {arguments.window_left, arguments.window_right}) {
    if (side < -1) {
      fail(ErrorCode::kArgument, "window is (", arguments.window_left, ", ", arguments.window_right,
           "); each side is a number of keys from 0 on, or -1 for no limit");
    }
  }
  if (!is_possible_scale(arguments.scale)) {
    fail(ErrorCode::kArgument, "scale is ", arguments.scale,
         "; a number is needed that is finite in float32 (default 1/sqrt(head_dim))");
  }
  if (!(arguments.softcap >= 0.0) || !is_possible_scale(arguments.softcap) ||
      (arguments.softcap > 0.0 && !is_possible_scale(arguments.scale / arguments.softcap))) {
    fail(ErrorCode::kArgument, "softcap is ", arguments.softcap,
         "; a positive number is needed that is finite in float32, as scale / softcap is, or 0 for none");
  }
  if (arguments.softcap > kMaxSoftcap) {
    fail(ErrorCode::kArgument, "softcap is ", arguments.softcap, "; supported: up to ", kMaxSoftcap,
         ", as it multiplies the rounding of tanh, or 0 for none");
  }
  if (arguments.num_splits < 0 || arguments.num_splits > kMaxSplits) {
    fail(ErrorCode::kArgument, "num_splits is ", arguments.num_splits, "; supported: 0 (the kernel's choice) to ",
         kMaxSplits);
  }
}

void check_scores(const VarlenArguments& arguments) {
  if (VarlenArguments::has(arguments.sinks)) {
    check_companion(arguments.sinks, "sinks", arguments, aoti_torch_dtype_float32(), 1);
    check_length(arguments.sinks, "sinks", arguments.heads_q(), "one for each query head");
  }
  const Tensor& mask = arguments.mask;
  if (!VarlenArguments::has(mask)) return;
  if (mask.device_type() != arguments.device_type || mask.device_index() != arguments.device_index) {
    fail(ErrorCode::kDevice, "the mask is on ", describe_device(mask), " and q on ", describe_device(arguments.q),
         "; move it with .to(q.device)");
  }
  if (mask.dtype() != arguments.torch_dtype && mask.dtype() != aoti_torch_dtype_bool()) {
    fail(ErrorCode::kDtype, "the mask is ", describe_dtype(mask.dtype()), "; supported: bool and q's ",
         describe_dtype(arguments.torch_dtype), "; convert it with .to(q.dtype)");
  }
  const int64_t sizes[] = {arguments.batch(), arguments.heads_q(), arguments.max_seqlen_q, arguments.max_seqlen_k};
  if (mask.dim() != 4 || !std::equal(sizes, sizes + 4, mask.sizes())) {
    fail(ErrorCode::kShape, "the mask has shape ", describe(mask), "; ", describe_sizes(sizes, 4),
         " is needed: [batch, query heads, queries, keys]; expand it");
  }
}

// New keys of two sequences or heads would lie on each other.
void check_not_expanded(const Tensor& cache, const char* name) {
  for (int64_t axis = 0; axis < cache.dim(); ++axis) {
    if (cache.sizes()[axis] > 1 && cache.strides()[axis] == 0) {
      fail(ErrorCode::kShape, name, " is expanded, so that new keys would overwrite each other; it has shape ",
           describe(cache), "; give it memory with .clone()");
    }
  }
}

// Rows are copied in any order. Values that lie in their keys (v is a part of k) are the same in caches and new rows, or the last to
// be written would stay.
void check_apart(const AppendArguments& arguments) {
  struct Memory {
    explicit Memory(const Tensor& of, const char* its_name) : tensor(of), name(its_name), range(memory_range(of)) {}
    const Tensor& tensor;
    const char* name;
    host::MemoryRange range;
  };
  const Memory caches[] = {Memory(arguments.k_cache, "k_cache"), Memory(arguments.v_cache, "v_cache")};
  for (const Memory& rows : {Memory(arguments.k_new, "k_new"), Memory(arguments.v_new, "v_new")}) {
    for (const Memory& cache : caches) {
      if (cache.range.meets(rows.range) && host::may_overlap(cache.tensor, rows.tensor)) {
        fail(ErrorCode::kShape, rows.name, " shares memory with ", cache.name,
             ", which would change while it is read; give it memory of its own with .clone()");
      }
    }
  }
  if (host::is_same_memory(arguments.k_cache, arguments.v_cache) &&
      !host::is_same_memory(arguments.k_new, arguments.v_new)) {
    fail(ErrorCode::kShape,
         "k_cache and v_cache are the same memory, but k_new and v_new are not, and would overwrite each other; "
         "give v_cache memory of its own, or a v_new that is a view of k_new");
  }
}

}  // namespace

void check_varlen_arguments(VarlenArguments& arguments) {
  check_operands(arguments);
  check_layouts(arguments);
  check_batch(arguments);
  check_sizes(arguments);
  if (!arguments.has_ragged_rows()) arguments.max_seqlen_q = arguments.q.sizes()[2];
  if (!arguments.has_ragged_keys() && !arguments.has_pages()) arguments.max_seqlen_k = arguments.k.sizes()[2];
  check_numbers(arguments);
  check_scores(arguments);
  check_varlen_lengths(arguments);
}

void check_varlen_backward_arguments(VarlenBackwardArguments& arguments) {
  VarlenArguments& forward = arguments.forward;
  check_varlen_arguments(forward);
  if (!(static_cast<float>(forward.scale) >= std::numeric_limits<float>::min())) {
    fail(ErrorCode::kArgument, "scale is ", forward.scale, "; this operator needs one above zero");
  }
  const int64_t* q_sizes = forward.q.sizes();
  const int64_t rank = forward.q.dim();
  int64_t sizes[4] = {q_sizes[0], q_sizes[1], q_sizes[2], 0};
  sizes[rank - 1] = forward.head_dim_v();
  for (const auto& [tensor, name] : {std::pair(&arguments.out, "out"), std::pair(&arguments.dout, "grad_out")}) {
    check_companion(*tensor, name, forward, forward.torch_dtype, rank);
    check_same_sizes(*tensor, name, sizes, rank);
  }
  if (rank == 3) std::swap(sizes[0], sizes[1]);
  for (const auto& [tensor, name] : {std::pair(&arguments.lse, "lse"), std::pair(&arguments.dlse, "grad_lse")}) {
    if (!VarlenArguments::has(*tensor)) continue;
    check_companion(*tensor, name, forward, aoti_torch_dtype_float32(), rank - 1);
    check_same_sizes(*tensor, name, sizes, rank - 1);
    int64_t stride = 1;
    for (int64_t axis = rank - 2; axis >= 0; --axis) {
      if (sizes[axis] > 1 && tensor->strides()[axis] != stride && has_elements(*tensor)) {
        fail(ErrorCode::kShape, name, " is not contiguous; call .contiguous() on it first");
      }
      stride *= sizes[axis];
    }
  }
}

void check_append_arguments(AppendArguments& arguments) {
  // k_new stands for a dense q of as many heads: the rules are the same.
  VarlenArguments cache;
  const auto alias = [](const Tensor& tensor) { return tensor.get() == nullptr ? Tensor() : host::alias(tensor); };
  cache.q = alias(arguments.k_new);
  cache.k = alias(arguments.k_cache);
  cache.v = alias(arguments.v_cache);
  cache.block_table = alias(arguments.block_table);
  cache.seqused_k = alias(arguments.cache_seqlens);
  check_operands(cache);
  check_layouts(cache);
  check_batch(cache);
  check_sizes(cache);
  const Tensor& k_new = arguments.k_new;
  const Tensor& v_new = arguments.v_new;
  if (v_new.dtype() != k_new.dtype() || v_new.device_type() != k_new.device_type() ||
      v_new.device_index() != k_new.device_index()) {
    fail(ErrorCode::kDtype, "v_new is ", describe_dtype(v_new.dtype()), " on ", describe_device(v_new),
         "; as k_new it must be ", describe_dtype(k_new.dtype()), " on ", describe_device(k_new));
  }
  if (v_new.dim() != 4 || !std::equal(k_new.sizes(), k_new.sizes() + 3, v_new.sizes()) ||
      v_new.sizes()[3] != cache.head_dim_v() || k_new.sizes()[1] != cache.heads_kv()) {
    fail(ErrorCode::kShape, "k_new has shape ", describe(k_new), " and v_new ", describe(v_new),
         "; [batch, heads, new keys, head_dim] of the caches' heads is needed, which are ", describe(arguments.k_cache),
         " and ", describe(arguments.v_cache));
  }
  check_memory(v_new, "v_new");
  if (k_new.sizes()[2] > 0) {
    check_not_expanded(arguments.k_cache, "k_cache");
    check_not_expanded(arguments.v_cache, "v_cache");
    check_apart(arguments);
  }
  arguments.dtype = cache.dtype;
  arguments.torch_dtype = cache.torch_dtype;
  arguments.device_type = cache.device_type;
  arguments.device_index = cache.device_index;
  check_append_lengths(arguments);
}

}  // namespace attention
}  // namespace flashmoe
