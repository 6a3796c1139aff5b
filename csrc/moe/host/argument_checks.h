// Rules shared by the operators of csrc/moe and csrc/linear: a violation is thrown by the rule's name
// (flashmoe/moe/rules.py explains it).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "host/arguments.h"
#include "moe/host/arguments.h"

namespace flashmoe::moe {

using host::describe_dtype;
using host::describe_sizes;
using host::violate;

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
constexpr int64_t kGpuMultiple = 8;  // of every size that a product sums over or outputs: 16 bytes

inline int32_t float32() { return aoti_torch_dtype_float32(); }
inline int32_t int32() { return aoti_torch_dtype_int32(); }
inline int32_t uint8() { return aoti_torch_dtype_uint8(); }
inline int32_t e4m3() { return aoti_torch_dtype_float8_e4m3fn(); }
inline bool is_integer(int32_t dtype) { return dtype == int32() || dtype == aoti_torch_dtype_int64(); }
inline bool is_cuda(const Common& common) { return common.device_type == aoti_torch_device_type_cuda(); }
inline std::string quoted(const char* name, int32_t dtype) { return std::string(name) + "'s " + describe_dtype(dtype); }

// Required tensors. What is not taken from the stack is not freed, so all are taken before the first error is thrown.
class RequiredTensors {
 public:
  explicit RequiredTensors(host::Arguments& inputs) : inputs_(inputs) {}

  Tensor next(const char* name) {
    Tensor tensor = inputs_.tensor();
    if (missing_ == nullptr && (!tensor.is_given() || !tensor.is_defined())) missing_ = name;
    return tensor;
  }
  void check() const {
    if (missing_ != nullptr) violate("tensor.missing", {{"name", missing_}});
  }

 private:
  host::Arguments& inputs_;
  const char* missing_ = nullptr;
};

// The tensor whose device a call's other tensors must be on; its name is for messages.
struct First {
  const Tensor& tensor;
  const char* name;
};

void check_device(const Tensor& tensor, const char* name, const First& first);
// `target`: the argument of `.to()` that the message recommends.
[[noreturn]] void refuse_dtype(const Tensor& tensor, const char* name, const std::string& needed,
                               const std::string& target);

// Requires the first tensor's device and `dtype`, which is the first tensor's dtype if `is_like_first`.
void check_kind(const Tensor& tensor, const char* name, const First& first, int32_t dtype, bool is_like_first = false);

// `axes`: the names of the dimensions, such as "[tokens, hidden]".
void check_rank(const Tensor& tensor, const char* name, int64_t rank, const char* axes);
void check_sizes(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes, const char* axes);
void check_size(int64_t value, const char* what, int64_t max = kMaxSize);
void check_experts(int64_t experts, const char* rule);  // `rule` says what to do with more
void check_gpu_multiple(const Common& common, int64_t value, const char* what, int64_t multiple = kGpuMultiple);
void check_slots(int64_t tokens, int64_t top_k);

// What the other tensors must match. `has_float32`: float32 is supported on a GPU, too.
Common common_of(const Tensor& tensor, const char* name, bool has_float32);

// A tensor without memory, as a tracer passes it, is not copied.
void make_contiguous(Tensor& tensor);
void make_rows_contiguous(Tensor& tensor);
void make_weights_contiguous(Tensor& tensor);  // of [experts, ., .]: one of the last two dimensions

// Strings are taken from the stack before any is checked: what is not taken is not freed.
Activation activation_of(const std::string& value);
bool is_interleaved_of(const std::string& value);
Scoring scoring_of(const std::string& value);

void check_sort(SortArguments& arguments, const First& first);

// Checks w13 and w2 against x and each other; fills in the sizes.
void check_weights(LayerShape& shape, const Common& common, const Tensor& x, Tensor& w13, Tensor& w2);
void check_biases(const LayerShape& shape, const Common& common, const First& x, Tensor& b13, Tensor& b2);

// Checks the arguments other than the weights, once check_weights has filled in the sizes.
void check_tokens(LayerArguments& arguments, const First& x);

// For a grouped product.
void check_grouped_sizes(const Common& common, int64_t experts, int64_t n, int64_t k);

}  // namespace flashmoe::moe
