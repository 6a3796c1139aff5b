#include "attention/host/varlen_lengths.h"

#include <algorithm>

#include "host/check_values.h"

namespace flashmoe::attention {
namespace {

using host::violate;

bool is_check_wanted(int32_t device_type, int32_t device_index) {
  return device_type == aoti_torch_device_type_cpu() || host::are_values_checked(device_type, device_index);
}

// An int32 tensor's values, in CPU memory.
class Numbers {
 public:
  explicit Numbers(const Tensor& tensor) {
    if (tensor.get() == nullptr) return;
    memory_ = host::in_cpu_memory(tensor);
    data_ = static_cast<const int32_t*>(memory_.data());
    row_stride_ = memory_.strides()[0];
    count_ = memory_.sizes()[0];
  }

  bool are_there() const { return data_ != nullptr; }
  int64_t count() const { return count_; }
  int32_t operator[](int64_t index) const { return data_[index]; }
  const int32_t* row(int64_t index) const { return data_ + index * row_stride_; }

 private:
  Tensor memory_;
  const int32_t* data_ = nullptr;
  int64_t row_stride_ = 0;
  int64_t count_ = 0;
};

void check_cu_seqlens(const Numbers& cu_seqlens, const char* name, int64_t tokens, int64_t max_seqlen,
                      const char* max_name, bool may_start_later = false) {
  const bool starts_wrong = cu_seqlens.count() > 0 && (may_start_later ? cu_seqlens[0] < 0 : cu_seqlens[0] != 0);
  if (starts_wrong) {
    violate("attention.first_length", {{"name", name}, {"first", cu_seqlens[0]}});
  }
  for (int64_t sequence = 0; sequence + 1 < cu_seqlens.count(); ++sequence) {
    const int64_t first = cu_seqlens[sequence], end = cu_seqlens[sequence + 1];
    if (end < first) {
      violate("attention.decreasing_lengths", {{"name", name}, {"first", first}, {"end", end}, {"sequence", sequence}});
    }
    if (end > tokens) {
      violate("attention.lengths_past_tokens",
              {{"name", name}, {"end", end}, {"sequence", sequence}, {"tokens", tokens}});
    }
    if (end - first > max_seqlen) {
      violate("attention.sequence_too_long", {{"name", name},
                                              {"found", end - first},
                                              {"sequence", sequence},
                                              {"max_name", max_name},
                                              {"max_seqlen", max_seqlen}});
    }
  }
}

int64_t room_of_pages(const VarlenArguments& arguments) {
  return arguments.block_table.sizes()[1] * arguments.k.sizes()[1];
}

// The capacity of a sequence in keys.
int64_t room_of(const VarlenArguments& arguments, const Numbers& cu_seqlens_k, int64_t sequence) {
  if (cu_seqlens_k.are_there()) return cu_seqlens_k[sequence + 1] - cu_seqlens_k[sequence];
  if (!arguments.has_pages()) return arguments.max_seqlen_k;
  return std::min(arguments.max_seqlen_k, room_of_pages(arguments));
}

// The first of a sequence's `used` keys that some row sees; pages before a window may belong to other sequences.
int64_t first_seen(const VarlenArguments& arguments, const Numbers& cu_seqlens_q, int64_t sequence, int64_t used) {
  if (arguments.window_left < 0) return 0;
  const int64_t rows =
      cu_seqlens_q.are_there() ? cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence] : arguments.max_seqlen_q;
  return std::clamp<int64_t>(used - rows - std::min(arguments.window_left, used), 0, used);
}

// Pages of keys [begin, end).
void check_pages(const Numbers& block_table, int64_t sequence, int64_t begin, int64_t end, int64_t page_size,
                 int64_t pages) {
  for (int64_t index = begin / page_size; index * page_size < end; ++index) {
    const int32_t page = block_table.row(sequence)[index];
    if (page < 0 || page >= pages) {
      violate("attention.page",
              {{"sequence", sequence}, {"index", index}, {"page", page}, {"pages", pages}, {"last", pages - 1}});
    }
  }
}

}  // namespace

void check_varlen_lengths(const VarlenArguments& arguments) {
  if (!arguments.has_ragged_rows() && !arguments.has_ragged_keys() && !VarlenArguments::has(arguments.seqused_k))
    return;
  if (!is_check_wanted(arguments.device_type, arguments.device_index)) return;
  const Numbers cu_seqlens_q(arguments.cu_seqlens_q), cu_seqlens_k(arguments.cu_seqlens_k);
  if (cu_seqlens_q.are_there()) {
    check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", arguments.q.sizes()[0], arguments.max_seqlen_q, "max_seqlen_q");
  }
  if (cu_seqlens_k.are_there()) {
    check_cu_seqlens(cu_seqlens_k, "cu_seqlens_k", arguments.k.sizes()[0], arguments.max_seqlen_k, "max_seqlen_k",
                     /*may_start_later=*/VarlenArguments::has(arguments.seqused_k));
  }
  const Numbers seqused_k(arguments.seqused_k), block_table(arguments.block_table);
  for (int64_t sequence = 0; sequence < seqused_k.count(); ++sequence) {
    const int64_t used = seqused_k[sequence], room = room_of(arguments, cu_seqlens_k, sequence);
    if (used < 0 || used > room) {
      const bool is_room_of_maximum = arguments.has_pages() && room < room_of_pages(arguments);
      violate(is_room_of_maximum ? "attention.used_past_max_seqlen" : "attention.used_past_room",
              {{"sequence", sequence}, {"used", used}, {"room", room}});
    }
    if (!block_table.are_there()) continue;
    check_pages(block_table, sequence, first_seen(arguments, cu_seqlens_q, sequence, used), used,
                arguments.k.sizes()[1], arguments.k.sizes()[0]);
  }
}

void check_append_lengths(const AppendArguments& arguments) {
  if (!is_check_wanted(arguments.device_type, arguments.device_index)) return;
  const bool is_paged = arguments.has_pages();
  const Numbers used(arguments.cache_seqlens), block_table(arguments.block_table);
  const int64_t* sizes = arguments.k_cache.sizes();
  const int64_t room = is_paged ? arguments.block_table.sizes()[1] * sizes[1] : sizes[2];
  const int64_t added = arguments.k_new.sizes()[2];
  for (int64_t sequence = 0; sequence < used.count(); ++sequence) {
    if (used[sequence] < 0) {
      violate("attention.negative_cache", {{"sequence", sequence}, {"found", used[sequence]}});
    }
    if (used[sequence] + added > room) {
      violate("attention.full_cache",
              {{"sequence", sequence}, {"room", room}, {"used", used[sequence]}, {"added", added}});
    }
    if (is_paged && added > 0)
      check_pages(block_table, sequence, used[sequence], used[sequence] + added, sizes[1], sizes[0]);
  }
}

}  // namespace flashmoe::attention
