// Registers the operators of ragged, paged and windowed attention with torch.

#include <algorithm>
#include <limits>
#include <utility>

#include "attention/host/backends.h"
#include "attention/host/backward_launch.h"
#include "attention/host/e4m3.h"
#include "attention/host/schemas.h"
#include "host/arguments.h"
#include "host/copies.h"
#include "host/last_kernel.h"

namespace flashmoe::attention {
namespace {

using host::box;

struct Cpu {
  static constexpr bool kIsCpu = true;
  static constexpr auto forward = &forward_varlen_cpu;
  static constexpr auto backward = &backward_varlen_cpu;
  static constexpr auto append = &append_cpu;
  static constexpr auto forward_e4m3 = &forward_e4m3_cpu;
  static constexpr auto append_e4m3 = &append_e4m3_cpu;
};
struct Cuda {
  static constexpr bool kIsCpu = false;
  static constexpr auto forward = &forward_varlen_cuda;
  static constexpr auto backward = &backward_varlen_cuda;
  static constexpr auto append = &append_cuda;
  static constexpr auto forward_e4m3 = &forward_e4m3_cuda;
  static constexpr auto append_e4m3 = &append_e4m3_cuda;
};

void zero(const Tensor& tensor) { host::check_shim(aoti_torch_zero_(tensor.get()), "zero_"); }

bool has_rows(const VarlenArguments& arguments) {
  return arguments.batch() > 0 && arguments.heads_q() > 0 && arguments.rows_total() > 0 && arguments.max_seqlen_q > 0;
}

// On the CPU: rows of no sequence get the result of rows that see no key.
void fill_on_cpu(const ForwardOutputs& outputs) {
  zero(outputs.out);
  if (!VarlenArguments::has(outputs.lse)) return;
  const int64_t rows = outputs.lse.sizes()[0] * outputs.lse.sizes()[1];
  std::fill_n(static_cast<float*>(outputs.lse.data()), rows, -std::numeric_limits<float>::infinity());
}

void parse_dropout(host::Arguments& given, VarlenArguments& arguments) {
  arguments.dropout_p = given.number();
  arguments.rng_state = given.tensor();
  if (!arguments.rng_state.is_given()) host::violate("tensor.missing", {{"name", "rng_state"}});
}

VarlenArguments parse_forward(host::Arguments& given, bool has_codes = false, bool has_dropout = false) {
  VarlenArguments arguments;
  arguments.has_codes = has_codes;
  given.tensors(arguments.q, arguments.k, arguments.v);
  given.optional_tensors(arguments.cu_seqlens_q, arguments.cu_seqlens_k, arguments.seqused_k, arguments.block_table,
                         arguments.sinks, arguments.mask);
  given.integers(arguments.max_seqlen_q, arguments.max_seqlen_k);
  arguments.scale = given.number();
  given.integers(arguments.window_left, arguments.window_right);
  arguments.softcap = given.number();
  arguments.num_splits = given.integer();
  if (has_dropout) parse_dropout(given, arguments);
  check_varlen_arguments(arguments);
  return arguments;
}

AppendArguments parse_append(host::Arguments& given, bool has_codes = false) {
  AppendArguments arguments;
  arguments.has_codes = has_codes;
  given.tensors(arguments.k_cache, arguments.v_cache, arguments.k_new, arguments.v_new, arguments.cache_seqlens);
  arguments.block_table = given.optional_tensor();
  check_append_arguments(arguments);
  return arguments;
}

template <class Parsed>
void parse_scales(host::Arguments& given, Parsed& arguments) {
  given.optional_tensors(arguments.k_scale.values, arguments.v_scale.values);
  given.numbers(arguments.k_scale.factor, arguments.v_scale.factor);
}

E4m3Arguments parse_e4m3(host::Arguments& given) {
  E4m3Arguments arguments;
  arguments.varlen = parse_forward(given, /*has_codes=*/true);
  parse_scales(given, arguments);
  check_e4m3_scales(arguments);
  return arguments;
}

E4m3AppendArguments parse_e4m3_append(host::Arguments& given) {
  E4m3AppendArguments arguments;
  arguments.append = parse_append(given, /*has_codes=*/true);
  parse_scales(given, arguments);
  check_e4m3_scales(arguments);
  return arguments;
}

VarlenArguments parse_forward_into(host::Arguments& given, Tensor& out) {
  out = given.tensor();
  VarlenArguments arguments = parse_forward(given);
  check_out(arguments, out);
  return arguments;
}

E4m3Arguments parse_e4m3_into(host::Arguments& given, Tensor& out) {
  out = given.tensor();
  E4m3Arguments arguments = parse_e4m3(given);
  check_out(arguments.varlen, out);
  return arguments;
}

// Takes the arguments from the output's type on.
template <class Operands, class Parsed>
void parse_fp8_rest(host::Arguments& given, Operands& operands, Parsed& arguments) {
  const bool is_f16 = given.flag();
  operands.dtype = is_f16 ? Dtype::kFloat16 : Dtype::kBFloat16;
  operands.torch_dtype = is_f16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
  given.optional_tensors(arguments.q_scale.values, arguments.k_scale.values, arguments.v_scale.values);
  given.numbers(arguments.q_scale.factor, arguments.k_scale.factor, arguments.v_scale.factor);
  check_fp8(arguments);
}

Fp8Arguments parse_fp8(host::Arguments& given) {
  Fp8Arguments arguments;
  given.tensors(arguments.forward.q, arguments.forward.k, arguments.forward.v);
  arguments.forward.scale = given.number();
  arguments.forward.is_causal = given.flag();
  parse_fp8_rest(given, arguments.forward, arguments);
  return arguments;
}

Fp8VarlenArguments parse_fp8_varlen(host::Arguments& given) {
  Fp8VarlenArguments arguments;
  VarlenArguments& varlen = arguments.varlen;
  varlen.has_code_queries = true;
  given.tensors(varlen.q, varlen.k, varlen.v, varlen.cu_seqlens_q, varlen.cu_seqlens_k);
  if (!varlen.cu_seqlens_q.is_given()) host::violate("tensor.missing", {{"name", "cu_seqlens_q"}});
  if (!varlen.cu_seqlens_k.is_given()) host::violate("tensor.missing", {{"name", "cu_seqlens_k"}});
  varlen.seqused_k = given.optional_tensor();
  given.integers(varlen.max_seqlen_q, varlen.max_seqlen_k);
  varlen.scale = given.number();
  varlen.window_right = given.flag() ? 0 : -1;
  parse_fp8_rest(given, varlen, arguments);
  return arguments;
}

const host::ArgumentCheck kCheckFp8Varlen("attention_fp8_varlen_forward",
                                          [](host::Arguments& given) { parse_fp8_varlen(given); });
const host::ArgumentCheck kCheckFp8("attention_fp8_forward", [](host::Arguments& given) { parse_fp8(given); });
const host::ArgumentCheck kCheckForward("attention_varlen_forward",
                                        [](host::Arguments& given) { parse_forward(given); });
const host::ArgumentCheck kCheckOut("_attention_varlen_out", [](host::Arguments& given) {
  Tensor out;
  parse_forward_into(given, out);
});
const host::ArgumentCheck kCheckE4m3Out("_attention_e4m3_out", [](host::Arguments& given) {
  Tensor out;
  parse_e4m3_into(given, out);
});
const host::ArgumentCheck kCheckDropout("attention_dropout_forward", [](host::Arguments& given) {
  parse_forward(given, /*has_codes=*/false, /*has_dropout=*/true);
});
const host::ArgumentCheck kCheckAppend("attention_append_", [](host::Arguments& given) { parse_append(given); });
const host::ArgumentCheck kCheckE4m3("attention_e4m3_forward", [](host::Arguments& given) { parse_e4m3(given); });
const host::ArgumentCheck kCheckE4m3Append("attention_append_e4m3_",
                                           [](host::Arguments& given) { parse_e4m3_append(given); });

// The outputs may be allocated here, or be the caller's, which has no lse.
template <class Backend>
void compute(VarlenArguments& arguments, const ForwardOutputs& outputs) {
  host::set_last_kernel("");
  if (Backend::kIsCpu && arguments.has_ragged_rows()) fill_on_cpu(outputs);
  if (has_rows(arguments)) Backend::forward(arguments, outputs);
}
template <class Backend>
void compute(E4m3Arguments& arguments, const ForwardOutputs& outputs) {
  host::set_last_kernel("");
  if (Backend::kIsCpu && arguments.varlen.has_ragged_rows()) fill_on_cpu(outputs);
  if (has_rows(arguments.varlen)) Backend::forward_e4m3(arguments, outputs);
}

template <class Backend, bool kWithLse, bool kHasDropout = false>
void boxed_forward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("attention_varlen", num_arguments, kHasDropout ? 18 : 16, num_outputs, kWithLse ? 2 : 1);
  host::Arguments given(stack);
  VarlenArguments arguments = parse_forward(given, /*has_codes=*/false, kHasDropout);
  make_scale_positive(arguments);
  ForwardOutputs outputs = allocate_outputs(arguments, kWithLse);
  compute<Backend>(arguments, outputs);
  stack[0] = box(std::move(outputs.out));
  if constexpr (kWithLse) stack[1] = box(std::move(outputs.lse));
}

template <class Backend>
void boxed_out(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_attention_varlen_out", num_arguments, 17, num_outputs, 0);
  host::Arguments given(stack);
  ForwardOutputs outputs;
  VarlenArguments arguments = parse_forward_into(given, outputs.out);
  make_scale_positive(arguments);
  compute<Backend>(arguments, outputs);
}

Tensor gradient_of(const Tensor& tensor, bool is_partial) {
  Tensor gradient = tensor.dim() == 4 ? dense_like(tensor, tensor.sizes(), tensor.dtype())
                                      : host::empty(tensor.dim(), tensor.sizes(), tensor.dtype(), tensor.device_type(),
                                                    tensor.device_index());
  if (is_partial) zero(gradient);
  return gradient;
}

// needs: bits of the gradients.
Gradients allocate_gradients(const VarlenBackwardArguments& arguments, int64_t needs, bool with_row_dot, bool is_empty,
                             bool is_cpu) {
  const VarlenArguments& forward = arguments.forward;
  // GPU kernels themselves write zeros for rows and keys that belong to no sequence.
  const bool has_other_rows = is_cpu && forward.has_ragged_rows();
  const bool has_other_keys = is_cpu && (forward.has_ragged_keys() || VarlenArguments::has(forward.seqused_k));
  Gradients gradients;
  if ((needs & kNeedsDq) != 0) gradients.dq = gradient_of(forward.q, is_empty || has_other_rows);
  if ((needs & kNeedsDk) != 0) gradients.dk = gradient_of(forward.k, is_empty || has_other_keys);
  if ((needs & kNeedsDv) != 0) gradients.dv = gradient_of(forward.v, is_empty || has_other_keys);
  if (with_row_dot) {
    gradients.row_dot = host::empty(arguments.lse.dim(), arguments.lse.sizes(), arguments.lse.dtype(),
                                    forward.device_type, forward.device_index);
  }
  return gradients;
}

// kWithMask: also returns the gradient of the scores behind a mask, if the kernels store it.
template <class Backend, bool kHasDropout = false, bool kWithMask = false>
void boxed_backward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("attention_varlen backward", num_arguments, kHasDropout ? 21 : 19, num_outputs, kWithMask ? 5 : 4);
  VarlenBackwardArguments arguments;
  VarlenArguments& forward = arguments.forward;
  host::Arguments given(stack);
  arguments.dout = given.tensor();
  arguments.dlse = given.optional_tensor();
  given.tensors(forward.q, forward.k, forward.v);
  given.optional_tensors(forward.cu_seqlens_q, forward.cu_seqlens_k, forward.seqused_k, forward.sinks, forward.mask);
  given.tensors(arguments.out, arguments.lse);
  given.integers(forward.max_seqlen_q, forward.max_seqlen_k);
  forward.scale = given.number();
  given.integers(forward.window_left, forward.window_right);
  forward.softcap = given.number();
  const int64_t needs = given.integer();
  if constexpr (kHasDropout) parse_dropout(given, forward);
  check_varlen_backward_arguments(arguments);
  const bool is_empty = !has_rows(forward) || forward.heads_kv() == 0 || forward.max_seqlen_k == 0;
  // The CPU's kernels do not return row_dot; a GPU's compute dk and dv together.
  const bool with_dkv = (needs & (kNeedsDk | kNeedsDv)) != 0;
  int64_t computed = !Backend::kIsCpu && with_dkv ? needs | kNeedsDk | kNeedsDv : needs;
  bool stores_scores = false;
  if constexpr (kWithMask) stores_scores = !is_empty && (needs & kNeedsMask) != 0 && stores_scores_gradient(arguments);
  if (stores_scores) computed |= kNeedsAll;
  Gradients gradients =
      allocate_gradients(arguments, computed, !Backend::kIsCpu && !is_empty, is_empty, Backend::kIsCpu);
  if constexpr (kWithMask) {
    if (stores_scores) allocate_mask_gradient(forward, gradients);
  }
  host::set_last_kernel("");
  if (!is_empty) Backend::backward(arguments, gradients);
  Tensor* const wanted[] = {&gradients.dq, &gradients.dk, &gradients.dv};
  for (int index = 0; index < 3; ++index) {
    stack[index] = (needs >> index & 1) != 0 ? host::box_optional(std::move(*wanted[index])) : host::box_none();
  }
  const auto give_found = [](Tensor& tensor) {
    return VarlenArguments::has(tensor) ? host::box_optional(std::move(tensor)) : host::box_none();
  };
  stack[3] = give_found(gradients.row_dot);
  if constexpr (kWithMask)
    stack[4] = give_found(VarlenArguments::has(gradients.mask) ? gradients.mask : gradients.scores);
}

template <class Backend>
void boxed_append(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("attention_append_", num_arguments, 6, num_outputs, 0);
  host::Arguments given(stack);
  const AppendArguments arguments = parse_append(given);
  const int64_t* sizes = arguments.k_new.sizes();
  if (sizes[0] > 0 && sizes[1] > 0 && sizes[2] > 0) Backend::append(arguments);
}

template <class Backend, bool kWithLse>
void boxed_e4m3(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("attention_e4m3", num_arguments, 20, num_outputs, kWithLse ? 2 : 1);
  host::Arguments given(stack);
  E4m3Arguments arguments = parse_e4m3(given);
  make_scale_positive(arguments.varlen);
  ForwardOutputs outputs = allocate_outputs(arguments.varlen, kWithLse);
  compute<Backend>(arguments, outputs);
  stack[0] = box(std::move(outputs.out));
  if constexpr (kWithLse) stack[1] = box(std::move(outputs.lse));
}

template <class Backend>
void boxed_e4m3_out(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_attention_e4m3_out", num_arguments, 21, num_outputs, 0);
  host::Arguments given(stack);
  ForwardOutputs outputs;
  E4m3Arguments arguments = parse_e4m3_into(given, outputs.out);
  make_scale_positive(arguments.varlen);
  compute<Backend>(arguments, outputs);
}

template <class Backend>
void boxed_append_e4m3(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("attention_append_e4m3_", num_arguments, 10, num_outputs, 0);
  host::Arguments given(stack);
  const E4m3AppendArguments arguments = parse_e4m3_append(given);
  const int64_t* sizes = arguments.append.k_new.sizes();
  if (sizes[0] > 0 && sizes[1] > 0 && sizes[2] > 0) Backend::append_e4m3(arguments);
}

void boxed_fp8(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("attention_fp8_forward", num_arguments, 12, num_outputs, 2);
  host::Arguments given(stack);
  const Fp8Arguments arguments = parse_fp8(given);
  ForwardOutputs outputs = allocate_outputs(arguments.forward, /*with_lse=*/true);
  host::set_last_kernel("");
  const int64_t* sizes = outputs.out.sizes();
  if (sizes[0] != 0 && sizes[1] != 0 && sizes[2] != 0) forward_fp8_cuda(arguments, outputs);
  stack[0] = box(std::move(outputs.out));
  stack[1] = box(std::move(outputs.lse));
}

void boxed_fp8_varlen(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("attention_fp8_varlen_forward", num_arguments, 17, num_outputs, 2);
  host::Arguments given(stack);
  const Fp8VarlenArguments arguments = parse_fp8_varlen(given);
  ForwardOutputs outputs = allocate_outputs(arguments.varlen, /*with_lse=*/true);
  host::set_last_kernel("");
  if (has_rows(arguments.varlen)) forward_fp8_cuda(arguments, outputs);
  stack[0] = box(std::move(outputs.out));
  stack[1] = box(std::move(outputs.lse));
}

template <class Backend, class Library>
void register_backend(Library& library) {
  library.impl("attention_e4m3_forward", &boxed_e4m3<Backend, true>);
  library.impl("_attention_e4m3_inference", &boxed_e4m3<Backend, false>);
  library.impl("_attention_e4m3_out", &boxed_e4m3_out<Backend>);
  library.impl("attention_append_e4m3_", &boxed_append_e4m3<Backend>);
  library.impl("attention_varlen_forward", &boxed_forward<Backend, true>);
  library.impl("_attention_varlen_inference", &boxed_forward<Backend, false>);
  library.impl("_attention_varlen_out", &boxed_out<Backend>);
  library.impl("_attention_varlen_backward", &boxed_backward<Backend>);
  library.impl("attention_dropout_forward", &boxed_forward<Backend, true, true>);
  library.impl("_attention_dropout_backward", &boxed_backward<Backend, true>);
  library.impl("attention_append_", &boxed_append<Backend>);
}

}  // namespace
}  // namespace flashmoe::attention

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) { flashmoe::attention::define_varlen(library); }

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, library) {
  flashmoe::attention::register_backend<flashmoe::attention::Cpu>(library);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) {
  flashmoe::attention::register_backend<flashmoe::attention::Cuda>(library);
  library.impl("_attention_mask_backward",
               &flashmoe::attention::boxed_backward<flashmoe::attention::Cuda, false, true>);
  library.impl("attention_fp8_forward", &flashmoe::attention::boxed_fp8);
  library.impl("attention_fp8_varlen_forward", &flashmoe::attention::boxed_fp8_varlen);
}
