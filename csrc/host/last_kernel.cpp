#include "host/last_kernel.h"

#include <array>
#include <cstdio>

namespace flashmoe::host {
namespace {

thread_local const char* g_last_kernel = "";
thread_local const char* g_last_isa = nullptr;  // of the CPU backend, if that ran

}  // namespace

void set_last_kernel(const char* symbol) {
  g_last_kernel = symbol;
  g_last_isa = nullptr;
}

void set_last_isa(const char* name) { g_last_isa = name; }

const char* last_kernel() {
  if (g_last_isa == nullptr) return g_last_kernel;
  thread_local std::array<char, 32> label;
  std::snprintf(label.data(), label.size(), "cpu:%s", g_last_isa);
  return label.data();
}

}  // namespace flashmoe::host
