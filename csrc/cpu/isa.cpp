#include "cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <array>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace flashmoe::cpu {
namespace {

bool has_baseline() { return true; }

#if defined(__x86_64__)
// XCR0 bits (Intel SDM vol. 1, 13.3): the register states that the operating system saves.
constexpr uint64_t kXcr0Avx = 0x6;         // SSE, AVX
constexpr uint64_t kXcr0Avx512 = 0xe6;     // and opmask, upper halves, upper registers
constexpr uint64_t kXcr0Amx = 0x60000;     // TILECFG, TILEDATA
constexpr int kArchReqXcompPerm = 0x1023;  // arch_prctl: Linux grants TILEDATA to a process that requests it
constexpr int kXfeatureTileData = 18;

uint64_t xcr0() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kOsxsave = 1u << 27;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & kOsxsave)) return 0;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool os_saves(uint64_t states) { return (xcr0() & states) == states; }

bool has_avx2() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kF16c = 1u << 29;  // __builtin_cpu_supports knows "f16c" only from g++ 12 on
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
         (ecx & kF16c) && os_saves(kXcr0Avx);
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && os_saves(kXcr0Avx512);
}

bool has_avx512_bf16() {  // __builtin_cpu_supports knows it only from g++ 12 on
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAvx512Bf16 = 1u << 5;  // leaf 7, subleaf 1, eax
  return has_avx512() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kAvx512Bf16);
}

bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // leaf 7, subleaf 0, edx
  constexpr unsigned kAvx512Vbmi = 1u << 1;                     // leaf 7, subleaf 0, ecx
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & (kAmxBf16 | kAmxTile)) != (kAmxBf16 | kAmxTile) || !os_saves(kXcr0Amx)) return false;
  if (!(ecx & kAvx512Vbmi)) return false;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}
#endif

struct Candidate {
  const char* name;
  bool (*supported)();
};

// In the order of Isa.
constexpr std::array<Candidate, kIsaCount> kCandidates = {{
#if defined(__x86_64__)
    {"baseline", has_baseline},
    {"avx2", has_avx2},
    {"avx512", has_avx512},
    {"avx512_bf16", has_avx512_bf16},
    {"amx", has_amx},
#else
    {"neon", has_baseline},
#endif
}};

const char* name_of(Isa isa) { return kCandidates[static_cast<size_t>(isa)].name; }

// The instruction sets that this machine can run; each includes the ones before it.
struct Supported {
  int count = 0;
  std::string names;

  Supported() {
    while (count < kIsaCount && kCandidates[static_cast<size_t>(count)].supported()) {
      names += count == 0 ? "" : ", ";
      names += kCandidates[static_cast<size_t>(count++)].name;
    }
  }
};

const Supported& supported() {
  static const Supported instance;
  return instance;
}

Isa find(const std::string& name, const char* source) {
  for (int i = 0; i < supported().count; ++i) {
    if (name == name_of(static_cast<Isa>(i))) return static_cast<Isa>(i);
  }
  throw std::invalid_argument(std::string(source) + ": instruction set '" + name +
                              "' is unknown or not supported by this machine; supported here: " + supported().names);
}

Isa default_isa() {
  const char* name = std::getenv("FLASHMOE_CPU_ISA");
  if (name != nullptr && *name != '\0') return find(name, "FLASHMOE_CPU_ISA");
  return static_cast<Isa>(supported().count - 1);
}

constexpr int kNotSelected = -1;
std::atomic<int> g_selected{kNotSelected};

}  // namespace

Isa current_isa() {
  int selected = g_selected.load(std::memory_order_acquire);
  if (selected == kNotSelected) {
    const int isa = static_cast<int>(default_isa());
    // Another thread, or set_isa, may have come first: its selection is kept.
    if (g_selected.compare_exchange_strong(selected, isa)) selected = isa;
  }
  return static_cast<Isa>(selected);
}

const char* selected_isa() { return name_of(current_isa()); }

bool set_isa(const char* name) {
  const bool is_default = name == nullptr || *name == '\0';
  const int isa = static_cast<int>(is_default ? default_isa() : find(name, "set_isa"));
  return g_selected.exchange(isa) != isa;
}

const char* supported_isas() { return supported().names.c_str(); }

}  // namespace flashmoe::cpu
