// The arguments of one operator call, taken one after the other in the order of its schema: from torch's stack, or, where a tracer asks
// whether a call is allowed, from their description in text. Both ways run the same checks, so a rule stands once.
//
//   ForwardArguments take_forward(host::Arguments& given) { ... given.tensor() ... given.number() ...; check(...); return ...; }
//   boxed function:   host::Arguments given(stack);  const ForwardArguments arguments = take_forward(given);
//   at trace time:    const host::ArgumentCheck kCheck("operator's name", [](host::Arguments& given) { take_forward(given); });
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>

#include "host/boxed.h"

namespace flashmoe {
namespace host {

class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : stack_(stack) {}
  // One argument in each line: "tensor DTYPE DEVICE RANK SIZES... STRIDES...", "none", "value NUMBER" or "text WORDS".
  explicit Arguments(const std::string& description);

  Tensor tensor() { return stack_ != nullptr ? take_tensor(*stack_++) : described_tensor(); }
  Tensor optional_tensor() { return stack_ != nullptr ? take_optional_tensor(*stack_++) : described_tensor(); }
  int64_t integer() { return stack_ != nullptr ? take<int64_t>(*stack_++) : described_integer(); }
  bool flag() { return stack_ != nullptr ? take<bool>(*stack_++) : described_integer() != 0; }
  double number() { return stack_ != nullptr ? take<double>(*stack_++) : described_number().value_or(0.0); }
  std::optional<double> optional_number() {
    return stack_ != nullptr ? take<std::optional<double>>(*stack_++) : described_number();
  }
  std::string text() { return stack_ != nullptr ? take_text(*stack_++) : described_line("text"); }

 private:
  Tensor described_tensor();
  int64_t described_integer();
  std::optional<double> described_number();
  // The next line's words after `kind`; empty for "none".
  std::string described_line(const char* kind);

  const StableIValue* stack_ = nullptr;
  std::string description_;
  std::size_t next_ = 0;
  std::list<TensorDescription> tensors_;  // what the tensors taken from the description borrow
};

// Registered under an operator's name, for flashmoe_check: takes the arguments and throws at the first rule that they break.
class ArgumentCheck {
 public:
  using Function = void (*)(Arguments& given);
  ArgumentCheck(const char* name, Function function);

  const char* name;
  Function function;
  const ArgumentCheck* next;
};

// "", or why the operator would refuse these arguments, as violate() words it.
std::string check_description(const char* name, const char* description);

}  // namespace host
}  // namespace flashmoe
