#include "host/arguments.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>

namespace flashmoe::host {
namespace {

const ArgumentCheck* g_checks = nullptr;  // written while the library is loaded

int32_t device_type_named(const std::string& name) {
  if (name == "cpu") return aoti_torch_device_type_cpu();
  if (name == "cuda") return aoti_torch_device_type_cuda();
  return name == "meta" ? aoti_torch_device_type_meta() : -1;
}

}  // namespace

std::string TextArguments::line(const char* kind) {
  const std::size_t end = text_.find('\n', next_);
  if (end == std::string::npos) fail(ErrorCode::kInternal, "a call is described with too few arguments");
  const std::string line = text_.substr(next_, end - next_);
  next_ = end + 1;
  const std::size_t length = std::strlen(kind);
  if (line == "none") return "";
  if (line.compare(0, length, kind) != 0) fail(ErrorCode::kInternal, "'", line, "' describes no ", kind);
  return line.substr(length + 1);
}

Tensor TextArguments::tensor() {
  std::istringstream words(line("tensor"), std::ios_base::in);
  std::string dtype;
  int64_t rank = 0;
  TensorDescription tensor;
  if (!(words >> dtype >> tensor.device >> rank)) return Tensor();
  tensor.dtype = dtype_named(dtype);
  const std::size_t colon = tensor.device.find(':');
  tensor.device_type = device_type_named(tensor.device.substr(0, colon));
  if (colon != std::string::npos) tensor.device_index = std::atoi(tensor.device.c_str() + colon + 1);
  for (std::vector<int64_t>* values : {&tensor.sizes, &tensor.strides}) {
    values->resize(static_cast<std::size_t>(rank));
    for (int64_t& value : *values) words >> value;
  }
  tensors_.push_back(std::move(tensor));
  return Tensor(&tensors_.back());
}

int64_t TextArguments::integer() { return std::strtoll(line("value").c_str(), nullptr, 10); }

std::optional<double> TextArguments::number() {
  const std::string word = line("value");
  if (word.empty()) return std::nullopt;
  return std::strtod(word.c_str(), nullptr);
}

ArgumentCheck::ArgumentCheck(const char* its_name, Function its_function)
    : name(its_name), function(its_function), next(g_checks) {
  g_checks = this;
}

std::string check_description(const char* name, const char* description) {
  try {
    for (const ArgumentCheck* check = g_checks; check != nullptr; check = check->next) {
      if (std::strcmp(check->name, name) != 0) continue;
      TextArguments described{std::string(description)};
      Arguments given(&described);
      check->function(given);
      return "";
    }
    fail(ErrorCode::kInternal, "no check is registered for the operator ", name);
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace flashmoe::host
