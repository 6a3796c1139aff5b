#include "host/copies.h"
#include "moe/host/argument_checks.h"

namespace flashmoe::moe {
namespace {

Common check_grouped_kinds(const Tensor& a, const Tensor& b, const Tensor& offsets) {
  const Common common = common_of(a, "a", /*has_float32=*/false);
  check_kind(b, "b", {a, "a"}, common.torch_dtype, /*is_like_first=*/true);
  check_kind(offsets, "offsets", {a, "a"}, int32());
  return common;
}

}  // namespace

GroupedArguments parse_grouped(host::Arguments& given) {
  GroupedArguments arguments;
  Needed needed(given);
  Tensor &a = arguments.a, &b = arguments.b_owner;
  a = needed.take("a");
  b = needed.take("b");
  arguments.offsets = needed.take("offsets");
  needed.check();
  arguments.common = check_grouped_kinds(a, b, arguments.offsets);
  check_rank(a, "a", 2, "[rows, k]");
  check_rank(b, "b", 3, "[experts, k, n]");
  arguments.rows = a.sizes()[0];
  const int64_t experts = b.sizes()[0], n = b.sizes()[2];
  check_sizes(b, "b", {experts, a.sizes()[1], n}, "[experts, k, n]");
  check_grouped_sizes(arguments.common, experts, n, b.sizes()[1]);
  check_sizes(arguments.offsets, "offsets", {experts}, "[experts]");
  make_rows_contiguous(a);
  make_weights_contiguous(b);
  make_contiguous(arguments.offsets);
  if (b.description() == nullptr) arguments.b = view_weights(b, /*is_transposed=*/true);
  return arguments;
}

GroupedGradientArguments parse_grouped_gradient(host::Arguments& given) {
  GroupedGradientArguments arguments;
  Needed needed(given);
  Tensor &a = arguments.a, &b = arguments.b;
  a = needed.take("a");
  b = needed.take("b");
  arguments.offsets = needed.take("offsets");
  needed.check();
  arguments.common = check_grouped_kinds(a, b, arguments.offsets);
  check_rank(a, "a", 2, "[n, rows]");
  check_rank(b, "b", 2, "[rows, k]");
  check_rank(arguments.offsets, "offsets", 1, "[experts]");
  const int64_t sizes[] = {a.sizes()[1], a.sizes()[0]}, strides[] = {a.strides()[1], a.strides()[0]};
  arguments.rows = sizes[0];
  arguments.experts = arguments.offsets.sizes()[0];
  check_sizes(b, "b", {arguments.rows, b.sizes()[1]}, "[rows, k]");
  check_grouped_sizes(arguments.common, arguments.experts, sizes[1], b.sizes()[1]);
  if (a.description() == nullptr) a = host::view_of(a, sizes, strides);
  make_rows_contiguous(a);
  make_rows_contiguous(b);
  make_contiguous(arguments.offsets);
  return arguments;
}

}  // namespace flashmoe::moe
