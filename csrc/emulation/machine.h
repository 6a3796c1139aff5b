// What the emulated instruction wrappers (include/ptx/) call. Every function acts for the current thread. `what` is the
// wrapper's name, for reports.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulation/numerics.h"
#include "emulation/site.h"

namespace flashmoe::emulation {

// Identity.
int thread_index();
int block_index();
int block_size();
int grid_size();

// Memory. The pointers that a kernel holds point into address space without memory, so that an access that bypasses
// these functions is reported, too. `smem` and `barrier` are shared addresses, as returned by shared_address.
unsigned char* shared_window();
uint32_t shared_address(const void* smem, const Site& site, const char* what);
void load_shared(void* to, uint32_t smem, int bytes, const Site& site, const char* what);
void store_shared(uint32_t smem, const void* from, int bytes, const Site& site, const char* what);
void add_shared(uint32_t smem, int32_t value, const Site& site, const char* what);
void load_global(void* to, const void* gmem, int bytes, const Site& site, const char* what);
void store_global(void* gmem, const void* from, int bytes, const Site& site, const char* what);
int32_t atomic_add(int32_t* gmem, int32_t value, const Site& site, const char* what);

// Programmatic dependent launch: after this the thread may touch what the preceding grid writes.
void grid_dependency_wait();

// Barriers.
constexpr int kWholeBlock = -1;
void barrier(int id, int threads, bool waits, const Site& site, const char* what);
void warp_barrier(const Site& site, const char* what);

// Warp collectives.
uint32_t shuffle_xor(uint32_t value, int lane_mask, const Site& site, const char* what);
uint32_t shuffle_index(uint32_t value, int lane, const Site& site, const char* what);
uint32_t ballot(bool predicate, const Site& site, const char* what);
uint32_t reduce_max(uint32_t value, const Site& site, const char* what);
uint32_t reduce_add(uint32_t value, const Site& site, const char* what);
bool elect(const Site& site, const char* what);
void load_matrix(uint32_t* r, uint32_t smem_row, int matrices, bool transposed, const Site& site, const char* what);
void store_matrix(uint32_t smem_row, const uint32_t* r, int matrices, bool transposed, const Site& site,
                  const char* what);
// d[4] += a * b of m16n8k(k): k = 16 reads a[4], b[2]; k = 8 reads a[2], b[1].
void matrix_product(float* d, const uint32_t* a, const uint32_t* b, int k, Format format, const Site& site,
                    const char* what);

// cp.async.
void copy_async(uint32_t smem, const void* gmem, int bytes, int source_bytes, const Site& site, const char* what);
void copy_async_commit(const Site& site, const char* what);
void copy_async_wait(int pending, const Site& site, const char* what);

// mbarrier and TMA. `tensor_map` points to the 128 bytes that emulation_encode_tensor_map wrote.
void mbarrier_init(uint32_t barrier, int arrivals, const Site& site, const char* what);
void mbarrier_init_fence(const Site& site, const char* what);
void mbarrier_arrive(uint32_t barrier, int expect_bytes, const Site& site, const char* what);
void mbarrier_arrive_copies(uint32_t barrier, const Site& site,
                            const char* what);  // once the thread's cp.async are complete
bool mbarrier_try_wait(uint32_t barrier, int phase_parity, const Site& site, const char* what);
void fence_proxy_async(const Site& site, const char* what);
void prefetch_tensor_map(const void* tensor_map, const Site& site, const char* what);
void tensor_load(uint32_t smem, const void* tensor_map, uint32_t barrier, int rank, const int* coordinates,
                 const Site& site, const char* what);
void tensor_store(const void* tensor_map, uint32_t smem, int rank, const int* coordinates, const Site& site,
                  const char* what);
// Ordered semaphores (ptx/ordered_semaphore.cuh). A polling thread lets others run, and work in flight complete.
void semaphore_wait(const int32_t* gmem, int32_t value, const Site& site, const char* what);
void semaphore_release(int32_t* gmem, int32_t value, const Site& site, const char* what);
void bulk_load(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier, const Site& site, const char* what);
// A bulk store to global memory, or with `adds` an addition of float32 words; `bytes` is a multiple of 16.
void bulk_copy(float* gmem, uint32_t smem, uint32_t bytes, bool adds, const Site& site, const char* what);
void tensor_store_commit(const Site& site, const char* what);
void tensor_store_wait(int pending, const Site& site, const char* what);

// wgmma: d[columns / 2] per thread; a == nullptr takes A from descriptor_a, else from the 4 registers at a, which must
// keep their values until the wait if a_has_address (they are the kernel's own, not copies for this call).
void wgmma_fence(const Site& site, const char* what);
void wgmma_commit(const Site& site, const char* what);
void wgmma_wait(int pending, const Site& site, const char* what);
void wgmma_product(float* d, int columns, const uint32_t* a, bool a_has_address, uint64_t descriptor_a,
                   uint64_t descriptor_b, bool transposed_a, bool transposed_b, int scale_d, Format format,
                   const Site& site, const char* what);
void set_max_registers(int registers, bool increase, const Site& site, const char* what);

}  // namespace flashmoe::emulation
