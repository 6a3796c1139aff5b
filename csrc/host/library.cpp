// The C functions of this library that Python reads through ctypes. Operators are not exported: each operation
// registers its own with torch (host/register.cpp in its folder), so a new one changes nothing here.

#include <exception>

#include "cpu/isa.h"
#include "host/arguments.h"
#include "host/kernel_table.h"
#include "host/last_kernel.h"

#define FLASHMOE_EXPORT extern "C" __attribute__((visibility("default")))

// The kernel that this thread's last operator call ran; "" when the output was empty or nothing ran yet.
FLASHMOE_EXPORT const char* flashmoe_last_kernel() { return flashmoe::host::last_kernel(); }

// The JSON index of the embedded device binaries, as in the section .flashmoe.index.
FLASHMOE_EXPORT const char* flashmoe_index_json() { return flashmoe::host::embedded_index(); }

// The CPU backend's instruction set; "" if FLASHMOE_CPU_ISA names one that this machine or this build lacks.
FLASHMOE_EXPORT const char* flashmoe_cpu_isa() {
  try {
    return flashmoe::cpu::selected_isa();
  } catch (const std::exception&) {
    return "";
  }
}

// Forces the CPU backend's instruction set; returns 0, or 1 when this machine or this build lacks it.
FLASHMOE_EXPORT int flashmoe_set_cpu_isa(const char* name) {
  try {
    flashmoe::cpu::set_isa(name);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

// "", or why `op` (an operator's name) would refuse the arguments that host::Arguments reads from `description`. Valid
// until this thread's next call.
FLASHMOE_EXPORT const char* flashmoe_check(const char* op, const char* description) {
  thread_local std::string text;
  text = flashmoe::host::check_description(op, description);
  return text.c_str();
}
