// Rings of shared-memory buffers, each guarded by mbarriers: a producer fills them, consumers empty them.
#pragma once

namespace flashmoe {

// A position in a ring of buffers, and the parity of the phase that its barriers are in.
template <int kNumStages>
struct RingPosition {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kNumStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance_by(int buffers) {
    stage += buffers;
    parity ^= stage / kNumStages % 2;
    stage %= kNumStages;
  }
};

}  // namespace flashmoe
