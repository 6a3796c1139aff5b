// The arguments of one operator call, read in the order of its schema: from torch's stack or, when a tracer asks
// whether a call is allowed, from a description in text. Both run the same checks, so each rule is written once.
//
//   ForwardArguments parse_forward(host::Arguments& given) { ... given.tensor() ... given.number() ...; check(...); return ...; }
//   boxed function:   host::Arguments given(stack);  const ForwardArguments arguments = parse_forward(given);
//   at trace time:    const host::ArgumentCheck kCheck("operator's name", [](host::Arguments& given) { parse_forward(given); });
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <utility>

#include "host/boxed.h"

namespace flashmoe::host {

// One argument per line: "tensor DTYPE DEVICE RANK SIZES... STRIDES...", "none", "value NUMBER" or "text WORDS".
class TextArguments {
 public:
  explicit TextArguments(std::string text) : text_(std::move(text)) {}
  Tensor tensor();  // borrows from this; not given for "none"
  int64_t integer();
  std::optional<double> number();
  // The next line's words after `kind`; empty for "none".
  std::string line(const char* kind);

 private:
  std::string text_;
  std::size_t next_ = 0;
  std::list<TensorDescription> tensors_;
};

class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : stack_(stack) {}
  explicit Arguments(TextArguments* described) : described_(described) {}

  Tensor tensor() { return described_ == nullptr ? unbox_tensor(*stack_++) : described_->tensor(); }
  Tensor optional_tensor() { return described_ == nullptr ? unbox_optional_tensor(*stack_++) : described_->tensor(); }
  int64_t integer() { return described_ == nullptr ? unbox<int64_t>(*stack_++) : described_->integer(); }
  bool flag() { return described_ == nullptr ? unbox<bool>(*stack_++) : described_->integer() != 0; }
  double number() { return described_ == nullptr ? unbox<double>(*stack_++) : described_->number().value_or(0.0); }
  std::optional<double> optional_number() {
    return described_ == nullptr ? unbox<std::optional<double>>(*stack_++) : described_->number();
  }
  // Several arguments of one kind, in order.
  template <class... T>
  void tensors(T&... taken) {
    ((taken = tensor()), ...);
  }
  template <class... T>
  void optional_tensors(T&... taken) {
    ((taken = optional_tensor()), ...);
  }
  template <class... T>
  void integers(T&... taken) {
    ((taken = integer()), ...);
  }
  template <class... T>
  void numbers(T&... taken) {
    ((taken = number()), ...);
  }
  std::string text() { return described_ == nullptr ? unbox_text(*stack_++) : described_->line("text"); }

 private:
  const StableIValue* stack_ = nullptr;
  TextArguments* described_ = nullptr;
};

// Registered under an operator's name, for flashmoe_check: reads the arguments and throws on the first broken rule.
class ArgumentCheck {
 public:
  using Function = void (*)(Arguments& given);
  ArgumentCheck(const char* name, Function function);

  const char* name;
  Function function;
  const ArgumentCheck* next;
};

// Returns "", or why the operator would refuse these arguments, in the format of violate().
std::string check_description(const char* name, const char* description);

}  // namespace flashmoe::host
