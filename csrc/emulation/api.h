// The C interface of an emulated kernel: buffers, tensor maps, launch. The addresses it returns are only for kernel
// parameters; the host must not dereference them.
#pragma once

#include <cstdint>

namespace flashmoe::emulation {

struct Launch {
  void (*entry)(const void* const* arguments);  // calls the kernel with parameters out of `arguments`
  const void* const* arguments;
  const char* name;
  int32_t grid;
  int32_t first_block;  // blocks first_block to first_block + run_blocks - 1 of the grid run: all, or some of a
  int32_t run_blocks;   // problem that is too large to run whole
  int32_t block;
  int32_t shared_bytes;            // dynamic
  int32_t resident_blocks;         // that run interleaved
  int32_t registers;               // per thread at launch (setmaxnreg)
  int32_t tensor_core_block;       // products that a tensor core adds at once: 4, 8 or 16
  int32_t tensor_core_extra_bits;  // bits kept below a float's 24: 0, 1 or 2
  int32_t async_policy;            // 0 lazy, 1 eager, 2 random; -1: from the seed
  int32_t check_races;
  uint64_t seed;  // of interleaving and delays
  uint64_t step_limit;
};

}  // namespace flashmoe::emulation

extern "C" {

// Maps host memory and returns its address for the kernel.
uint64_t emulation_add_buffer(void* storage, uint64_t bytes, int writable, int initialised, const char* name);
// Reserves address space without buffers; emulation_map_buffer maps some into it (tensors with huge strides).
uint64_t emulation_reserve(uint64_t bytes);
void emulation_map_buffer(uint64_t address, void* storage, uint64_t bytes, int writable, int initialised,
                          const char* name);
// The kernel is a dependent launch, and the preceding grid writes this buffer (given by its address).
void emulation_expect_from_preceding_grid(uint64_t address);
void emulation_clear_buffers();

// Fills the 128 bytes at `map`, with the checks of cuTensorMapEncodeTiled. dims and box count elements, innermost
// first; strides are in bytes, for dimensions 1 and up. Returns null, or what is wrong.
const char* emulation_encode_tensor_map(void* map, int element_bytes, int rank, uint64_t address, const uint64_t* dims,
                                        const uint64_t* strides, const uint32_t* box, int swizzle_bytes);

// Runs a kernel and returns a JSON report, valid until the next call: "failure" is null, or says what went wrong, where
// and in which thread.
const char* emulation_launch(const flashmoe::emulation::Launch* launch);

}  // extern "C"
