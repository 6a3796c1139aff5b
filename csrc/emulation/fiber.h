// Threads of a kernel as fibers: own stacks, switched by hand, all on one thread of the machine that runs them.
#pragma once

#include <cstddef>

namespace flashmoe::emulation {

// A place to switch to: the stack pointer, with the callee-saved registers on the stack below it.
struct Context {
  void* stack_pointer = nullptr;
  // For AddressSanitizer, which must be told of every switch.
  void* sanitizer_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
};

// Lays out a new stack so that the first switch to the context calls function(argument), which must not return.
void prepare(Context& context, unsigned char* stack, size_t bytes, void (*function)(void*), void* argument);

// Saves the running context in `from` and continues `to`.
void switch_context(Context& from, Context& to);

// Call first after every arrival in a context (prepare's function, and the code after switch_context does it itself).
void arrived(Context& context);

// Memory for stacks, each with an inaccessible page below it.
unsigned char* allocate_stacks(size_t count, size_t bytes_each);
void release_stacks(unsigned char* stacks, size_t count, size_t bytes_each);

}  // namespace flashmoe::emulation
