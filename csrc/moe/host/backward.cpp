// The backward pass of the layer on a GPU: which kernels, on what, and the list that is launched.

#include <optional>
#include <utility>

#include "host/last_kernel.h"
#include "moe/host/backends.h"
#include "moe/host/launch.h"
#include "moe/host/prepare.h"

namespace flashmoe {
namespace moe {
namespace {

// The layer's tensors, as the kernels can load them; weights the other way round: dz = (dout W2) ..., dx = dz W13.
struct BackwardOperands {
  Tensor dout;
  Tensor x;
  WeightOperand w13;
  WeightOperand w2;
  Tensor b2;

  explicit BackwardOperands(const LayerBackwardArguments& arguments)
      : dout(loadable_rows(arguments.dout)),
        x(loadable_rows(arguments.x)),
        w13(loadable_weights(arguments.w13, arguments.shape.is_transposed)),
        w2(loadable_weights(arguments.w2, arguments.shape.is_transposed)),
        b2(loadable_rows(arguments.b2)) {
    w13.view = swapped(w13.view);
    w2.view = swapped(w2.view);
  }
};

// A matrix of rows: in place, or by their slots those of tokens.
struct Rows {
  const void* data;
  int64_t stride;
  int64_t columns;
  const int32_t* slots;  // null: in place
};

bool is_wanted(const Tensor& gradient) { return gradient.get() != nullptr; }

class BackwardCall {
 public:
  BackwardCall(const LayerBackwardArguments& arguments, const LayerGradients& gradients);
  void run();

 private:
  const Kernel& combine_kernel() const { return select_step(request_, Step::kCombineBackward); }
  bool needs_dz() const;
  bool needs_combine() const { return is_wanted(gradients_.dx) || is_wanted(gradients_.dweights); }

  void allocate(const host::CudaCall& call);
  void add_gather(GatherParams& params, const Tensor& tokens);
  void add_gated(const host::CudaCall& call);
  void add_weight_gradient(std::optional<ProductPart>& part, const host::CudaCall& call, const Rows& first,
                           const Rows& second, const Tensor& gradient);
  void add_rows_of_dx(const host::CudaCall& call);
  void add_combine();
  void add_bias_gradient(BiasGradientParams& params, const Rows& rows, const float* row_weights,
                         const Tensor& gradient);

  void set_common(GemmParams& params) const;
  bool is_dependent() { return std::exchange(has_launched_, true); }
  ProductPart make_product(Product product, const ExpertWeights& weights) const {
    return ProductPart(product, request_, weights, /*is_paired=*/false, shape_.slots, shape_.experts);
  }

  const LayerBackwardArguments& arguments_;
  const LayerGradients& gradients_;
  const LayerShape& shape_;
  const host::Device& gpu_;
  const host::KernelRequest request_;
  const BackwardOperands operands_;
  const Sorted sorted_;

  host::Workspace workspace_;
  void* dz_ = nullptr;                   // [slots, 2 * intermediate]
  void* weighted_activation_ = nullptr;  // [slots, intermediate]
  void* rows_ = nullptr;                 // [slots, hidden]: of dout, then of dx, then of x
  float* row_dots_ = nullptr;            // [dot_tiles][slots]

  // Parts of the list, and whether an earlier one has been added.
  host::LaunchList list_;
  bool has_launched_ = false;
  std::optional<host::TileCounter> counter_;
  std::optional<ProductPart> gated_, dw2_, dx_, dw13_;
  GatherParams dout_rows_{}, x_rows_{};
  CombineParams combine_{};
  BiasGradientParams db13_{}, db2_{};
};

BackwardCall::BackwardCall(const LayerBackwardArguments& arguments, const LayerGradients& gradients)
    : arguments_(arguments),
      gradients_(gradients),
      shape_(arguments.shape),
      gpu_(host::device(arguments.common.device_index)),
      request_(host::make_request(gpu_, arguments.common.dtype)),
      operands_(arguments),
      sorted_(pointers_of(arguments.sorted)) {
  if (needs_dz()) gated_.emplace(make_product(Product::kGatedBackward, operands_.w2.view));
  if (is_wanted(gradients.dw2)) dw2_.emplace(make_product(Product::kWeightGradient, sizes_of(gradients.dw2)));
  if (is_wanted(gradients.dx)) dx_.emplace(make_product(Product::kPlain, operands_.w13.view));
  if (is_wanted(gradients.dw13)) dw13_.emplace(make_product(Product::kWeightGradient, sizes_of(gradients.dw13)));
}

bool BackwardCall::needs_dz() const {
  return needs_combine() || is_wanted(gradients_.dw13) || is_wanted(gradients_.dw2) || is_wanted(gradients_.db13);
}

void BackwardCall::set_common(GemmParams& params) const {
  params.expert_offsets = sorted_.expert_offsets;
  params.row_weights = sorted_.row_weights;
  params.tokens = static_cast<int32_t>(shape_.tokens);
  params.top_k = static_cast<int32_t>(shape_.top_k);
}

// Of what is temporary only the rows always have memory of their own. The gradient of the preactivation takes its place if it may.
// The weighted activation and the dots have been read before the last product writes dw13: where they fit they stand in it.
void BackwardCall::allocate(const host::CudaCall& call) {
  if (!gated_.has_value()) return;
  const int64_t dot_tiles = ceil_div(shape_.intermediate, kDotColumns);
  const int64_t activation_bytes = 2 * shape_.slots * shape_.intermediate;
  const int64_t dots_bytes = 4 * shape_.slots * dot_tiles;
  const int64_t dw13_bytes = dw13_.has_value() ? 4 * shape_.experts * shape_.intermediate * shape_.hidden : 0;
  const bool lends_for_activation = activation_bytes <= dw13_bytes;
  const bool lends_for_dots = activation_bytes + dots_bytes <= dw13_bytes;
  const int64_t dz = arguments_.consumes ? 0 : workspace_.add<char>(2 * activation_bytes);
  const int64_t activation = lends_for_activation ? 0 : workspace_.add<char>(activation_bytes);
  const int64_t dots = lends_for_dots ? 0 : workspace_.add<char>(dots_bytes);
  const int64_t rows = workspace_.add<uint16_t>(shape_.slots * shape_.hidden);
  workspace_.allocate(call);
  char* const lent = static_cast<char*>(data_or_null(gradients_.dw13));
  dz_ = arguments_.consumes ? arguments_.preactivation.data() : workspace_.address<void>(dz);
  weighted_activation_ = lends_for_activation ? lent : workspace_.address<char>(activation);
  row_dots_ = reinterpret_cast<float*>(lends_for_dots ? lent + activation_bytes : workspace_.address<char>(dots));
  rows_ = workspace_.address<void>(rows);
}

// A product that multiplies rows in place is faster by more than it takes to put them there.
void BackwardCall::add_gather(GatherParams& params, const Tensor& tokens) {
  const Kernel& kernel = select_step(request_, Step::kGather);
  params.a = tokens.data();
  params.rows = rows_;
  params.slot_rows = sorted_.slot_rows;
  params.a_stride = tokens.strides()[0];
  params.tokens = static_cast<int32_t>(shape_.tokens);
  params.top_k = static_cast<int32_t>(shape_.top_k);
  params.columns = static_cast<int32_t>(shape_.hidden);
  list_.add({&kernel, ceil_div(shape_.tokens, kernel.threads / 32), &params, nullptr, is_dependent()});
}

void BackwardCall::add_gated(const host::CudaCall& call) {
  GemmParams& params = gated_->params;
  set_common(params);
  params.a = rows_;
  params.a_stride = shape_.hidden;
  params.d = dz_;
  params.d_stride = 2 * shape_.intermediate;
  params.preactivation = arguments_.preactivation.data();
  params.weighted_activation = weighted_activation_;
  params.row_dots = row_dots_;
  params.activation = shape_.activation;
  params.is_interleaved = shape_.is_interleaved ? 1 : 0;
  gated_->add(list_, is_dependent(), call, counter_);
}

// [experts, first.columns, second.columns].
void BackwardCall::add_weight_gradient(std::optional<ProductPart>& part, const host::CudaCall& call, const Rows& first,
                                       const Rows& second, const Tensor& gradient) {
  GemmParams& params = part->params;
  set_common(params);
  params.a = first.data;
  params.a_stride = first.stride;
  params.b = second.data;
  params.b_stride = second.stride;
  params.d = gradient.data();
  params.d_stride = second.columns;
  params.n = static_cast<int32_t>(first.columns);
  params.k = static_cast<int32_t>(second.columns);
  part->add(list_, is_dependent(), call, counter_);
}

void BackwardCall::add_rows_of_dx(const host::CudaCall& call) {
  GemmParams& params = dx_->params;
  set_common(params);
  params.a = dz_;
  params.a_stride = params.k;
  params.d = rows_;
  params.d_stride = params.n;
  dx_->add(list_, is_dependent(), call, counter_);
}

void BackwardCall::add_combine() {
  const Kernel& kernel = combine_kernel();
  combine_.rows = rows_;
  combine_.out = data_or_null(gradients_.dx);
  combine_.out_stride = shape_.hidden;
  combine_.slot_rows = sorted_.slot_rows;
  combine_.row_dots = row_dots_;
  combine_.dweights = static_cast<float*>(data_or_null(gradients_.dweights));
  combine_.bias = data_or_null(operands_.b2);
  combine_.dout = operands_.dout.data();
  combine_.dout_stride = operands_.dout.strides()[0];
  combine_.expert_offsets = sorted_.expert_offsets;
  combine_.tokens = static_cast<int32_t>(shape_.tokens);
  combine_.top_k = static_cast<int32_t>(shape_.top_k);
  combine_.columns = static_cast<int32_t>(shape_.hidden);
  combine_.experts = static_cast<int32_t>(shape_.experts);
  combine_.dot_tiles = static_cast<int32_t>(ceil_div(shape_.intermediate, kDotColumns));
  const int64_t grid = combine_grid(kernel, shape_.tokens, shape_.hidden, gpu_.num_multiprocessors);
  list_.add({&kernel, grid, &combine_, nullptr, is_dependent()});
}

void BackwardCall::add_bias_gradient(BiasGradientParams& params, const Rows& rows, const float* row_weights,
                                     const Tensor& gradient) {
  constexpr int64_t kColumnsPerBlock = 64;
  params.a = rows.data;
  params.d = gradient.data();
  params.row_weights = row_weights;
  params.expert_offsets = sorted_.expert_offsets;
  params.a_slots = rows.slots;
  params.a_stride = rows.stride;
  params.experts = static_cast<int32_t>(shape_.experts);
  params.top_k = static_cast<int32_t>(shape_.top_k);
  params.columns = static_cast<int32_t>(rows.columns);
  list_.add({&select_step(request_, Step::kBiasGradient), shape_.experts * ceil_div(rows.columns, kColumnsPerBlock),
             &params, nullptr, is_dependent()});
}

void BackwardCall::run() {
  const host::CudaCall call(gpu_);
  allocate(call);
  const Rows dout{operands_.dout.data(), operands_.dout.strides()[0], shape_.hidden, sorted_.row_slots};
  const Rows dz{dz_, 2 * shape_.intermediate, 2 * shape_.intermediate, nullptr};
  const Rows gathered{rows_, shape_.hidden, shape_.hidden, nullptr};
  const Rows activation{weighted_activation_, shape_.intermediate, shape_.intermediate, nullptr};
  const bool turned = shape_.is_transposed;
  if (gated_.has_value()) {
    add_gather(dout_rows_, operands_.dout);
    add_gated(call);
  }
  if (dw2_.has_value()) {
    add_weight_gradient(dw2_, call, turned ? activation : gathered, turned ? gathered : activation, gradients_.dw2);
  }
  if (dx_.has_value()) add_rows_of_dx(call);
  if (needs_combine()) add_combine();
  if (dw13_.has_value()) {
    add_gather(x_rows_, operands_.x);
    add_weight_gradient(dw13_, call, turned ? gathered : dz, turned ? dz : gathered, gradients_.dw13);
  }
  if (is_wanted(gradients_.db13)) add_bias_gradient(db13_, dz, /*row_weights=*/nullptr, gradients_.db13);
  if (is_wanted(gradients_.db2)) add_bias_gradient(db2_, dout, sorted_.row_weights, gradients_.db2);
  list_.run(call);
  if (gated_.has_value()) host::set_last_kernel(gated_->kernel().symbol);
}

}  // namespace

void layer_backward_cuda(const LayerBackwardArguments& arguments, const LayerGradients& gradients) {
  BackwardCall(arguments, gradients).run();
}

}  // namespace moe
}  // namespace flashmoe
