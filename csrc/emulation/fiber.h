// Threads of a kernel as fibers: each has its own stack, and all run on one host thread, which switches between them.
#pragma once

#include <cstddef>

namespace flashmoe::emulation {

// A suspended fiber: the stack pointer; the callee-saved registers are on its stack.
struct Context {
  void* stack_pointer = nullptr;
  // For AddressSanitizer, which must be notified of every switch.
  void* sanitizer_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
};

// Lays out a new stack so that the first switch to the context calls function(argument), which must not return.
void prepare(Context& context, unsigned char* stack, size_t bytes, void (*function)(void*), void* argument);

// Saves the running context in `from` and continues `to`.
void switch_context(Context& from, Context& to);

// Must be the first call after every switch into a context: prepare's function makes it, switch_context does so itself.
void arrived(Context& context);

// Memory for stacks, each with an inaccessible page below it.
unsigned char* allocate_stacks(size_t count, size_t bytes_each);
void release_stacks(unsigned char* stacks, size_t count, size_t bytes_each);

}  // namespace flashmoe::emulation
