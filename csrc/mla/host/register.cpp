// Registers the operators of multi-head latent attention with torch. On the CPU flashmoe/mla/ computes them.
#include <utility>

#include "host/boxed.h"
#include "host/last_kernel.h"
#include "mla/host/append.h"
#include "mla/host/arguments.h"
#include "mla/params/decode.h"

namespace flashmoe::mla {
namespace {

const host::ArgumentCheck kCheckDecode("mla_decode", [](host::Arguments& given) { parse_decode(given); });

void boxed_decode(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("mla_decode", num_arguments, 9, num_outputs, 2);
  host::Arguments given(stack);
  const DecodeArguments arguments = parse_decode(given);
  const Tensor& q = arguments.q;
  Tensor out = host::empty({arguments.batch(), arguments.tokens(), arguments.heads(), kLatentDim}, q.dtype(),
                           q.device_type(), q.device_index());
  Tensor lse = host::empty({arguments.batch(), arguments.heads(), arguments.tokens()}, aoti_torch_dtype_float32(),
                           q.device_type(), q.device_index());
  host::set_last_kernel("");
  if (arguments.batch() > 0 && arguments.tokens() > 0) decode_cuda(arguments, out, lse);
  stack[0] = host::box(std::move(out));
  stack[1] = host::box(std::move(lse));
}

const host::ArgumentCheck kCheckAppend("mla_append_", [](host::Arguments& given) { parse_append(given); });

void boxed_append(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("mla_append_", num_arguments, 5, num_outputs, 0);
  host::Arguments given(stack);
  const AppendArguments arguments = parse_append(given);
  if (arguments.batch() > 0 && arguments.tokens() > 0) append_cuda(arguments);
}

}  // namespace
}  // namespace flashmoe::mla

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) {
  library.def(
      "mla_decode(Tensor q, Tensor kv_cache, Tensor? cache_seqlens, Tensor? block_table, Tensor? sinks, float scale, "
      "bool causal, int num_splits, Tensor? indices) -> (Tensor out, Tensor lse)");
  library.def(
      "mla_append_(Tensor latents, Tensor(a!) kv_cache, Tensor? cache_seqlens, Tensor? block_table, Tensor? slots) -> "
      "()");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) {
  library.impl("mla_decode", &flashmoe::mla::boxed_decode);
  library.impl("mla_append_", &flashmoe::mla::boxed_append);
}
