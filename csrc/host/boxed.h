// Boxed calls, by which torch's dispatcher runs an operator: on entry the stack holds the arguments, whose tensors we
// then own, and on return the owned results. An operation registers its functions itself
// (STABLE_TORCH_LIBRARY_FRAGMENT, _IMPL).
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <string>

#include "host/error.h"
#include "host/tensor.h"

namespace flashmoe::host {

// Throws if a schema and the function registered for it differ. `name`: the operation's.
inline void check_counts(const char* name, uint64_t num_arguments, uint64_t arguments_registered, uint64_t num_outputs,
                         uint64_t outputs_registered) {
  if (num_arguments == arguments_registered && num_outputs == outputs_registered) return;
  fail(ErrorCode::kInternal, name, " was called with ", num_arguments, " arguments for ", num_outputs, " results; ",
       arguments_registered, " and ", outputs_registered, " are registered");
}

// An argument by value: bool, int64_t, double, or an optional of one.
template <class T>
T unbox(StableIValue argument) {
  return torch::stable::detail::to<T>(argument);
}

// A text argument. torch's own conversion to std::string leaks it, and needs GLIBCXX_3.4.26.
inline std::string unbox_text(StableIValue argument) {
  const auto handle = unbox<StringHandle>(argument);
  std::size_t length = 0;
  const char* text = nullptr;
  check_shim(torch_string_length(handle, &length), "string_length");
  check_shim(torch_string_c_str(handle, &text), "string_c_str");
  std::string copied(text, length);
  check_shim(torch_delete_string(handle), "delete_string");
  return copied;
}

inline Tensor unbox_tensor(StableIValue argument) { return Tensor(unbox<AtenTensorHandle>(argument)); }

// For an argument declared as Tensor?: a null handle for None.
inline Tensor unbox_optional_tensor(StableIValue argument) {
  return Tensor(unbox<std::optional<AtenTensorHandle>>(argument).value_or(nullptr));
}

// A result declared as Tensor; as Tensor?; and as None.
inline StableIValue box(Tensor result) { return torch::stable::detail::from(result.release()); }
inline StableIValue box_optional(Tensor result) {
  return torch::stable::detail::from(std::optional<AtenTensorHandle>(result.release()));
}
inline StableIValue box_none() { return torch::stable::detail::from(std::nullopt); }

}  // namespace flashmoe::host
