// Registers attention's operators with torch.

#include <cmath>
#include <utility>

#include "attention/host/backends.h"
#include "attention/host/schemas.h"
#include "host/arguments.h"
#include "host/last_kernel.h"

namespace flashmoe::attention {
namespace {

// The operators of schemas.h.
enum class Operator { kForward, kInference, kDropIn };
struct Cpu {
  static constexpr auto forward = &forward_cpu;
  static constexpr auto forward_varlen = &forward_varlen_cpu;
};
struct Cuda {
  static constexpr auto forward = &forward_cuda;
  static constexpr auto forward_varlen = &forward_varlen_cuda;
};

// Returns whether scaled_dot_product_attention means the same as our operator: four dimensions, nothing to broadcast, a
// square mask.
bool matches_sdpa(const ForwardArguments& arguments, bool enable_gqa) {
  const Tensor& q = arguments.q;
  const Tensor& k = arguments.k;
  if (!q.is_defined() || !k.is_defined() || q.dim() != 4 || k.dim() != 4) return false;
  const int64_t* q_sizes = q.sizes();
  const int64_t* k_sizes = k.sizes();
  return q_sizes[0] == k_sizes[0] && (enable_gqa || q_sizes[1] == k_sizes[1]) &&
         (!arguments.is_causal || q_sizes[2] == k_sizes[2]);
}

// Values with another head_dim run on the ragged kernels: decided only here.
bool has_other_values(const ForwardArguments& arguments) {
  const Tensor& q = arguments.q;
  const Tensor& v = arguments.v;
  return q.is_defined() && v.is_defined() && q.dim() == 4 && v.dim() == 4 && q.sizes()[3] != v.sizes()[3];
}

// The same call of the ragged operator, whose values may be wider or narrower than its keys.
VarlenArguments as_varlen(ForwardArguments& arguments) {
  VarlenArguments varlen;
  varlen.scale =
      arguments.has_default_scale ? 1.0 / std::sqrt(static_cast<double>(arguments.q.sizes()[3])) : arguments.scale;
  varlen.q = std::move(arguments.q);
  varlen.k = std::move(arguments.k);
  varlen.v = std::move(arguments.v);
  varlen.window_right = arguments.is_causal ? 0 : -1;
  check_varlen_arguments(varlen);
  return varlen;
}

template <class Backend>
ForwardOutputs forward_other_values(ForwardArguments& arguments, bool with_lse) {
  VarlenArguments varlen = as_varlen(arguments);
  make_scale_positive(varlen);
  ForwardOutputs outputs = allocate_outputs(varlen, with_lse);
  host::set_last_kernel("");
  if (varlen.batch() != 0 && varlen.heads_q() != 0 && varlen.max_seqlen_q != 0)
    Backend::forward_varlen(varlen, outputs);
  return {std::move(outputs.out), std::move(outputs.lse)};
}

template <class Backend>
ForwardOutputs forward(ForwardArguments& arguments, bool with_lse) {
  if (has_other_values(arguments)) return forward_other_values<Backend>(arguments, with_lse);
  check_arguments(arguments);
  ForwardOutputs outputs = allocate_outputs(arguments, with_lse);
  host::set_last_kernel("");
  const int64_t* sizes = outputs.out.sizes();
  if (sizes[0] != 0 && sizes[1] != 0 && sizes[2] != 0) Backend::forward(arguments, outputs);
  return outputs;
}

ForwardArguments parse_forward(host::Arguments& given, Operator op) {
  ForwardArguments arguments;
  given.tensors(arguments.q, arguments.k, arguments.v);
  if (op == Operator::kForward) {
    arguments.scale = given.number();
  } else {
    const std::optional<double> scale = given.optional_number();
    arguments.has_default_scale = !scale.has_value();
    arguments.scale = scale.value_or(0.0);
  }
  arguments.is_causal = given.flag();
  return arguments;
}

template <Operator kOperator>
void check_described(host::Arguments& given) {
  ForwardArguments arguments = parse_forward(given, kOperator);
  if (has_other_values(arguments)) {
    as_varlen(arguments);
  } else {
    check_arguments(arguments);
  }
}

const host::ArgumentCheck kCheckForward("flash_attention_forward", &check_described<Operator::kForward>);
const host::ArgumentCheck kCheckInference("_flash_attention_inference", &check_described<Operator::kInference>);

template <Operator kOperator, class Backend>
void boxed_forward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  constexpr bool kWithLse = kOperator == Operator::kForward;
  host::check_counts("attention", num_arguments, kOperator == Operator::kDropIn ? 6 : 5, num_outputs, kWithLse ? 2 : 1);
  host::Arguments given(stack);
  ForwardArguments arguments = parse_forward(given, kOperator);
  if constexpr (kOperator == Operator::kDropIn) {
    if (!matches_sdpa(arguments, given.flag())) {
      stack[0] = host::box_none();
      return;
    }
  }
  ForwardOutputs outputs = forward<Backend>(arguments, kWithLse);
  if constexpr (kOperator == Operator::kDropIn) {
    stack[0] = host::box_optional(std::move(outputs.out));
  } else {
    stack[0] = host::box(std::move(outputs.out));
  }
  if constexpr (kWithLse) stack[1] = host::box(std::move(outputs.lse));
}

template <class Backend, class Library>
void register_backend(Library& library) {
  library.impl("flash_attention_forward", &boxed_forward<Operator::kForward, Backend>);
  library.impl("_flash_attention_inference", &boxed_forward<Operator::kInference, Backend>);
  library.impl("_flash_attention_drop_in", &boxed_forward<Operator::kDropIn, Backend>);
}

}  // namespace
}  // namespace flashmoe::attention

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) { flashmoe::attention::define_dense(library); }

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, library) {
  flashmoe::attention::register_backend<flashmoe::attention::Cpu>(library);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) {
  flashmoe::attention::register_backend<flashmoe::attention::Cuda>(library);
}
