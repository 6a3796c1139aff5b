// Errors that the Python side turns into typed exceptions: the text is `flashmoe:<code>: <message>`.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace flashmoe {
namespace host {

// The codes that flashmoe/checks.py knows.
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

}  // namespace host
}  // namespace flashmoe
