#include "host/tile_counters.h"

#include <map>
#include <mutex>
#include <utility>

namespace flashmoe {
namespace host {
namespace {

constexpr int64_t kStreamsAtOnce = 64;  // served by one allocation

struct Pool {
  int32_t* next = nullptr;
  int64_t num_left = 0;  // streams
};

using StreamKey = std::pair<int32_t, CUstream>;

bool is_capturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = driver().cuStreamIsCapturing(stream, &status);
  // The legacy stream cannot be captured; asked while another stream is, the driver answers with this error.
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return false;
  check_driver(result, "cuStreamIsCapturing", "before a launch");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void clear(int32_t* counters, int64_t count, CUstream stream) {
  fill_words(counters, 0, count, stream, count, " tile counters");
}

// Counters that no other stream uses; their memory is kept until the process ends, like torch's streams.
int32_t* take_from_pool(Pool& pool, int32_t device_index) {
  if (pool.num_left == 0) {
    Tensor memory = empty({kStreamsAtOnce * kMaxCounters}, aoti_torch_dtype_int32(), aoti_torch_device_type_cuda(),
                          device_index);
    pool.next = static_cast<int32_t*>(memory.data());
    pool.num_left = kStreamsAtOnce;
    memory.release();
  }
  int32_t* taken = pool.next;
  pool.next += kMaxCounters;
  --pool.num_left;
  return taken;
}

int32_t* counter_of(const StreamKey& key) {
  static std::mutex mutex;
  static auto& pools =
      *new std::map<int32_t, Pool>;  // never destroyed: other threads may launch while the process exits
  static auto& counters = *new std::map<StreamKey, int32_t*>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = counters.find(key);
  if (known != counters.end()) return known->second;
  int32_t* fresh = take_from_pool(pools[key.first], key.first);
  clear(fresh, kMaxCounters, key.second);
  counters.emplace(key, fresh);
  return fresh;
}

}  // namespace

TileCounter tile_counter(const CudaCall& call, int64_t count) {
  if (count > kMaxCounters) fail(ErrorCode::kInternal, count, " tile counters; host/tile_counters.h has ", kMaxCounters);
  if (is_capturing(call.stream)) {
    TileCounter own;
    own.owner = empty({count}, aoti_torch_dtype_int32(), aoti_torch_device_type_cuda(), call.gpu.index);
    own.address = static_cast<int32_t*>(own.owner.data());
    clear(own.address, count, call.stream);
    return own;
  }
  thread_local StreamKey last_key{-1, nullptr};
  thread_local int32_t* last_counter = nullptr;
  const StreamKey key{call.gpu.index, call.stream};
  if (last_counter == nullptr || key != last_key) {
    last_counter = counter_of(key);
    last_key = key;
  }
  return {last_counter, Tensor()};
}

}  // namespace host
}  // namespace flashmoe
