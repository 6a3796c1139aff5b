#include "host/tile_counters.h"

#include <map>
#include <mutex>
#include <utility>

namespace flashmoe::host {
namespace {

constexpr int64_t kPoolCounters = 1 << 20;  // per allocation
constexpr int64_t kLineCounters = 32;       // 128 bytes: blocks of different launches poll different lines

struct Pool {
  int32_t* next = nullptr;
  int64_t num_left = 0;
};

using StreamKey = std::pair<int32_t, CUstream>;

void clear(int32_t* counters, int64_t count, CUstream stream) {
  fill_words(counters, 0, count, stream, count, " tile counters");
}

// Counters keep their owner until the process ends: a stream (which the process keeps, too), or a captured graph, whose
// end is not reported.
class CounterPools {
 public:
  int32_t* of_stream(const StreamKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = of_streams_.find(key);
    if (known != of_streams_.end()) return known->second;
    Pool& pool = pools_[key.first];
    if (pool.num_left < kMaxCounters) refill(pool, key);
    int32_t* fresh = take(pool, kMaxCounters);
    clear(fresh, kMaxCounters, key.second);  // by this stream itself: another one may have made the pool just now
    of_streams_.emplace(key, fresh);
    return fresh;
  }

  // Null if no uncaptured call has made a pool, or captured calls have used it up.
  int32_t* of_capture(int32_t device_index, int64_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Pool& pool = pools_[device_index];
    return pool.num_left < count ? nullptr : take(pool, count);
  }

 private:
  static int32_t* take(Pool& pool, int64_t count) {
    const int64_t lines = (count + kLineCounters - 1) / kLineCounters * kLineCounters;
    int32_t* taken = pool.next;
    pool.next += lines;
    pool.num_left -= lines;
    return taken;
  }

  // Not from torch's allocator: while torch.compile warms up what it will replay as a graph, that allocator returns
  // memory of the graph's own pool, and refuses a tensor that lives longer.
  static void refill(Pool& pool, const StreamKey& key) {
    CUdeviceptr memory = 0;
    {
      const RelaxedCapture relaxed("before allocating tile counters");
      check_driver(driver().cuMemAlloc(&memory, kPoolCounters * sizeof(int32_t)), "cuMemAlloc", kPoolCounters,
                   " tile counters");
    }
    pool.next = reinterpret_cast<int32_t*>(memory);
    pool.num_left = kPoolCounters;
    clear(pool.next, kPoolCounters, key.second);
  }

  std::mutex mutex_;
  std::map<int32_t, Pool> pools_;  // by device
  std::map<StreamKey, int32_t*> of_streams_;
};

CounterPools& counter_pools() {
  static auto& pools = *new CounterPools;  // never destroyed: other threads may launch while the process exits
  return pools;
}

}  // namespace

bool is_capturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = driver().cuStreamIsCapturing(stream, &status);
  // The legacy stream cannot be captured; queried while another stream is, the driver returns this error.
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return false;
  check_driver(result, "cuStreamIsCapturing", "before a launch");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

TileCounter tile_counter(const CudaCall& call, int64_t count) {
  if (count > kMaxCounters)
    fail(ErrorCode::kInternal, count, " tile counters; host/tile_counters.h has ", kMaxCounters);
  if (is_capturing(call.stream)) {
    TileCounter own;
    own.address = counter_pools().of_capture(call.gpu.index, count);
    if (own.address != nullptr) return own;
    own.owner = empty({count}, aoti_torch_dtype_int32(), aoti_torch_device_type_cuda(), call.gpu.index);
    own.address = static_cast<int32_t*>(own.owner.data());
    clear(own.address, count, call.stream);
    return own;
  }
  thread_local StreamKey last_key{-1, nullptr};
  thread_local int32_t* last_counter = nullptr;
  const StreamKey key{call.gpu.index, call.stream};
  if (last_counter == nullptr || key != last_key) {
    last_counter = counter_pools().of_stream(key);
    last_key = key;
  }
  return {last_counter, Tensor()};
}

}  // namespace flashmoe::host
