#include "emulation/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

// Pushes the ABI's callee-saved registers onto the old stack, then switches to the new stack.
#if defined(__x86_64__)
extern "C" void flashmoe_emulation_switch(void** save, void* load);
asm(R"(
.text
.p2align 4
.globl flashmoe_emulation_switch
.hidden flashmoe_emulation_switch
.type flashmoe_emulation_switch, @function
flashmoe_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size flashmoe_emulation_switch, .-flashmoe_emulation_switch
.globl flashmoe_emulation_start
.hidden flashmoe_emulation_start
.type flashmoe_emulation_start, @function
flashmoe_emulation_start:
  movq %r12, %rdi
  callq *%r13
  ud2
.size flashmoe_emulation_start, .-flashmoe_emulation_start
)");
constexpr int kSavedWords = 6;  // r15 r14 r13 r12 rbx rbp, lowest address first
constexpr int kArgument = 3, kFunction = 2;
#elif defined(__aarch64__)
extern "C" void flashmoe_emulation_switch(void** save, void* load);
asm(R"(
.text
.p2align 4
.globl flashmoe_emulation_switch
.hidden flashmoe_emulation_switch
.type flashmoe_emulation_switch, %function
flashmoe_emulation_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size flashmoe_emulation_switch, .-flashmoe_emulation_switch
.globl flashmoe_emulation_start
.hidden flashmoe_emulation_start
.type flashmoe_emulation_start, %function
flashmoe_emulation_start:
  mov x0, x19
  blr x20
  brk #1
.size flashmoe_emulation_start, .-flashmoe_emulation_start
)");
#else
#error "the fiber switch is written for x86-64 and AArch64"
#endif
extern "C" void flashmoe_emulation_start();

namespace flashmoe {
namespace emulation {

void prepare(Context& context, unsigned char* stack, size_t bytes, void (*function)(void*), void* argument) {
  uintptr_t* top = reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15});
#if defined(__x86_64__)
  *--top = 0;  // the start routine is entered by ret: keeps the call in it 16-byte aligned
  *--top = 0;
  *--top = reinterpret_cast<uintptr_t>(&flashmoe_emulation_start);
  top -= kSavedWords;
  for (int i = 0; i < kSavedWords; ++i) top[i] = 0;
  top[kArgument] = reinterpret_cast<uintptr_t>(argument);
  top[kFunction] = reinterpret_cast<uintptr_t>(function);
#else
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = 0;
  top[0] = reinterpret_cast<uintptr_t>(argument);                    // x19
  top[1] = reinterpret_cast<uintptr_t>(function);                    // x20
  top[11] = reinterpret_cast<uintptr_t>(&flashmoe_emulation_start);  // x30
#endif
  context.stack_pointer = top;
  context.stack_bottom = stack;
  context.stack_bytes = bytes;
  context.sanitizer_stack = nullptr;
}

void switch_context(Context& from, Context& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.sanitizer_stack, to.stack_bottom, to.stack_bytes);
#endif
  flashmoe_emulation_switch(&from.stack_pointer, to.stack_pointer);
  arrived(from);
}

void arrived(Context& context) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(context.sanitizer_stack, nullptr, nullptr);
#else
  (void)context;
#endif
}

namespace {
constexpr size_t kPage = 4096;
}

unsigned char* allocate_stacks(size_t count, size_t bytes_each) {
  void* memory =
      mmap(nullptr, count * bytes_each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("flashmoe emulation: stacks");
    std::abort();
  }
  unsigned char* stacks = static_cast<unsigned char*>(memory);
  for (size_t i = 0; i < count; ++i) mprotect(stacks + i * bytes_each, kPage, PROT_NONE);
  return stacks;
}

void release_stacks(unsigned char* stacks, size_t count, size_t bytes_each) { munmap(stacks, count * bytes_each); }

}  // namespace emulation
}  // namespace flashmoe
