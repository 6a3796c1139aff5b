#include <cstring>

#include "attention/cpu/attention.h"
#include "attention/cpu/backward.h"
#include "attention/host/backends.h"
#include "host/cpu_call.h"
#include "host/last_kernel.h"

namespace flashmoe::attention {

void forward_cpu(const ForwardArguments& arguments, const ForwardOutputs& outputs) {
  const char* isa = host::checked_isa();
  cpu::attention_forward(make_params(arguments, outputs), host::scalar_type(arguments.dtype), arguments.is_causal,
                         host::torch_parallel, host::num_cpu_threads());
  host::set_last_isa(isa);
}

void backward_cpu(const BackwardParams& params, const ForwardArguments& arguments) {
  const char* isa = host::checked_isa();
  cpu::attention_backward(params, host::scalar_type(arguments.dtype), arguments.is_causal, host::torch_parallel,
                          host::num_cpu_threads());
  host::set_last_isa(isa);
}

void forward_varlen_cpu(const VarlenArguments& arguments, const ForwardOutputs& outputs) {
  const char* isa = host::checked_isa();
  const Dropout dropout = arguments.has_dropout() ? make_dropout(arguments) : Dropout{};
  cpu::attention_forward_varlen(make_varlen_params(arguments, outputs), host::scalar_type(arguments.dtype),
                                arguments.has_dropout() ? &dropout : nullptr, host::torch_parallel,
                                host::num_cpu_threads());
  host::set_last_isa(isa);
}

void backward_varlen_cpu(const VarlenBackwardArguments& arguments, const Gradients& gradients) {
  const char* isa = host::checked_isa();
  const VarlenArguments& forward = arguments.forward;
  const Dropout dropout = forward.has_dropout() ? make_dropout(forward) : Dropout{};
  cpu::attention_backward_varlen(make_backward_params(make_varlen_params(forward, {}), arguments, gradients),
                                 host::scalar_type(forward.dtype), forward.has_dropout() ? &dropout : nullptr,
                                 host::torch_parallel, host::num_cpu_threads());
  host::set_last_isa(isa);
}

namespace {

// Copies the new rows of head_dim elements into one cache.
void append_rows(const AppendArguments& arguments, const Tensor& cache, const Tensor& added) {
  const bool is_paged = arguments.has_pages();
  const Strides to = strides_of(cache, is_paged), from = strides_of(added);
  const int64_t element = arguments.dtype == Dtype::kFloat32 ? 4 : 2;
  const int64_t* sizes = added.sizes();
  const int64_t row_bytes = sizes[3] * element;
  const int64_t page_size = is_paged ? cache.sizes()[1] : 0;
  const auto* used = static_cast<const int32_t*>(arguments.cache_seqlens.data());
  for (int64_t sequence = 0; sequence < sizes[0]; ++sequence) {
    for (int64_t i = 0; i < sizes[2]; ++i) {
      int64_t batch = sequence, key = used[sequence] + i;
      if (is_paged) {
        const auto* table = static_cast<const int32_t*>(arguments.block_table.data());
        batch = table[sequence * arguments.block_table.strides()[0] + key / page_size];
        key %= page_size;
      }
      for (int64_t head = 0; head < sizes[1]; ++head) {
        const int64_t source = sequence * from.batch + head * from.head + i * from.row;
        const int64_t target = batch * to.batch + head * to.head + key * to.row;
        std::memcpy(static_cast<char*>(cache.data()) + target * element,
                    static_cast<const char*>(added.data()) + source * element, static_cast<std::size_t>(row_bytes));
      }
    }
  }
}

}  // namespace

// Lengths and pages are already checked: on the CPU they always are.
void append_cpu(const AppendArguments& arguments) {
  append_rows(arguments, arguments.k_cache, arguments.k_new);
  append_rows(arguments, arguments.v_cache, arguments.v_new);
}

}  // namespace flashmoe::attention
