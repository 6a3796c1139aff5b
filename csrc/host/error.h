// Errors that the Python side turns into typed exceptions. A broken rule for arguments is thrown as
// `flashmoe:<rule>|name=value|...`: C++ decides, flashmoe/rules.py and the rules of each operation explain. A failure
// of the machine (driver, memory) is `flashmoe:<code>: <message>`.
#pragma once

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace flashmoe::host {

// The codes that flashmoe/rules.py knows.
enum class ErrorCode { kShape, kDtype, kDevice, kArgument, kGpu, kDriver, kMemory, kInternal };

inline const char* error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kShape:
      return "shape";
    case ErrorCode::kDtype:
      return "dtype";
    case ErrorCode::kDevice:
      return "device";
    case ErrorCode::kArgument:
      return "argument";
    case ErrorCode::kGpu:
      return "gpu";
    case ErrorCode::kDriver:
      return "driver";
    case ErrorCode::kMemory:
      return "memory";
    case ErrorCode::kInternal:
      break;
  }
  return "internal";
}

template <typename... Parts>
[[noreturn]] void fail(ErrorCode code, const Parts&... parts) {
  std::ostringstream text{std::ios_base::out};  // the default constructor needs GLIBCXX_3.4.26
  text << "flashmoe:" << error_code_name(code) << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// A value of a broken rule, under the name that the rule's explanation uses.
struct Value {
  Value(const char* its_name, std::string its_text) : name(its_name), text(std::move(its_text)) {}
  Value(const char* its_name, const char* its_text) : name(its_name), text(its_text) {}
  template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
  Value(const char* its_name, Number value) : name(its_name) {
    std::ostringstream stream{std::ios_base::out};
    stream << value;
    text = stream.str();
  }

  const char* name;
  std::string text;
};

// `rule`: a key of RULES in flashmoe/rules.py, or in rules.py of the operation's package.
[[noreturn]] inline void violate(const char* rule, std::initializer_list<Value> values = {}) {
  std::string text = std::string("flashmoe:") + rule + '|';
  for (const Value& value : values) {
    text += value.name;
    text += '=';
    for (const char c : value.text) {  // separators are escaped, as in a URL
      if (c == '|' || c == '%' || c == '\n') {
        text += c == '|' ? "%7C" : c == '%' ? "%25" : "%0A";
      } else {
        text += c;
      }
    }
    text += '|';
  }
  throw std::runtime_error(text);
}

}  // namespace flashmoe::host
