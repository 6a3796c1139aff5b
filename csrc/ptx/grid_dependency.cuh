// Programmatic dependent launch (sm_90 and later; elsewhere a no-op, because launches are then in full order): a kernel
// launched with the attribute may start before the preceding one in the stream has ended.
#pragma once

namespace flashmoe::ptx {

// In the preceding kernel: the dependent one may be scheduled once every block has called this, or has exited.
__device__ __forceinline__ void grid_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In the dependent kernel, before it reads what the preceding one writes: waits until that one has ended and its writes
// are visible. Without the launch attribute it does not wait.
__device__ __forceinline__ void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flashmoe::ptx
