// Where a wrapper was called: taken by default arguments, so kernels pass nothing.
#pragma once

namespace flashmoe::emulation {

struct Site {
  const char* file;
  int line;
  const char* function;  // the calling function

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE(),
                             const char* function = __builtin_FUNCTION()) {
    return Site{file, line, function};
  }
};

}  // namespace flashmoe::emulation
