// Which instruction set the kernels of every operation use.
#pragma once

namespace flashmoe::cpu {

// Narrowest first. The first is what every processor of the architecture has. FLASHMOE_CPU_KERNELS takes one kernel per
// instruction set of x86-64, and keeps those that this architecture has.
#if defined(__x86_64__)
enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmx };
constexpr int kIsaCount = 5;
#define FLASHMOE_CPU_KERNELS(first, ...) first, __VA_ARGS__
#elif defined(__aarch64__)
enum class Isa { kNeon };
constexpr int kIsaCount = 1;
#define FLASHMOE_CPU_KERNELS(first, ...) first
#else
#error "the CPU kernels are written for x86-64 and AArch64"
#endif

// The instruction set in use: the widest that the CPU and the operating system support, unless FLASHMOE_CPU_ISA (read
// once, at the first call) or set_isa named another.
// Throws std::invalid_argument when FLASHMOE_CPU_ISA names an unknown or unsupported one.
Isa current_isa();

// The same as "baseline", "avx2", "avx512", "avx512_bf16" or "amx"; on AArch64 "neon".
const char* selected_isa();

// Forces an instruction set; null or "" goes back to the default. Returns whether the selection changed.
// Throws std::invalid_argument, naming the supported set, for an unknown or unsupported name.
bool set_isa(const char* name);

// The instruction sets that this machine can run, separated by commas, narrowest first.
const char* supported_isas();

}  // namespace flashmoe::cpu
