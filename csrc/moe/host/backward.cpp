// The layer's backward pass on a GPU: selects the kernels, prepares their operands and launches them as one list.

#include <optional>

#include "host/last_kernel.h"
#include "moe/host/backends.h"
#include "moe/host/launch.h"

namespace flashmoe::moe {
namespace {

// The layer's tensors in a form that the kernels can load. Weights have n and k swapped: dz = (dout W2) ..., dx = dz
// W13.
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

class BackwardCall {
 public:
  BackwardCall(const LayerBackwardArguments& arguments, const LayerGradients& gradients);
  void run();

 private:
  void allocate();
  void add_gather(GatherParams& params, const Tensor& tokens);
  void add_gated();
  void add_weight_gradient(GroupedGemm& product, const Rows& n_rows, const Rows& k_rows, const Tensor& gradient);
  void add_rows_of_dx();
  void add_bias_gradient(BiasGradientParams& params, const Rows& rows, const float* row_weights,
                         const Tensor& gradient);

  bool is_dependent() const { return !list_.is_empty(); }
  GroupedGemm product(Product product, const ExpertWeights& weights) const {
    return make_gemm(product, request_, weights, /*is_interleaved=*/false, shape_.slots, shape_.experts);
  }

  const LayerBackwardArguments& arguments_;
  const LayerGradients& gradients_;
  const LayerShape& shape_;
  const host::Device& gpu_;
  const host::KernelRequest request_;
  const BackwardOperands operands_;
  const Sorted sorted_;
  const host::CudaCall call_;
  CallList list_;

  host::Workspace workspace_;
  void* dz_ = nullptr;                   // [slots, 2 * intermediate]
  void* weighted_activation_ = nullptr;  // [slots, intermediate]
  void* rows_ = nullptr;                 // [slots, hidden]: of dout, then of dx, then of x
  float* row_dots_ = nullptr;            // [dot_tiles][slots]

  std::optional<GroupedGemm> gated_, dw2_, dx_, dw13_;
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
      sorted_(pointers_of(arguments.sorted)),
      call_(gpu_),
      list_(call_) {
  if (needs_dz(arguments)) gated_.emplace(product(Product::kGatedBackward, operands_.w2.view));
  if (gradients.dw2.is_given()) dw2_.emplace(product(Product::kWeightGradient, sizes_of(gradients.dw2)));
  if (gradients.dx.is_given()) dx_.emplace(product(Product::kPlain, operands_.w13.view));
  if (gradients.dw13.is_given()) dw13_.emplace(product(Product::kWeightGradient, sizes_of(gradients.dw13)));
}

// Of the temporaries, only the rows always have their own memory. The gradient of the preactivation overwrites it if it
// may. The weighted activation and the dots are read before the last product writes dw13: they use its memory if they
// fit.
void BackwardCall::allocate() {
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
  workspace_.allocate(call_);
  char* const lent = static_cast<char*>(data_or_null(gradients_.dw13));
  dz_ = arguments_.consumes ? arguments_.preactivation.data() : workspace_.address<void>(dz);
  weighted_activation_ = lends_for_activation ? lent : workspace_.address<char>(activation);
  row_dots_ = reinterpret_cast<float*>(lends_for_dots ? lent + activation_bytes : workspace_.address<char>(dots));
  rows_ = workspace_.address<void>(rows);
}

// Multiplying rows in place saves more time than gathering them takes.
void BackwardCall::add_gather(GatherParams& params, const Tensor& tokens) {
  const Kernel& kernel = select_op(request_, Op::kGather);
  params.a = tokens.data();
  params.rows = rows_;
  params.slot_rows = sorted_.slot_rows;
  params.a_stride = tokens.strides()[0];
  params.tokens = static_cast<int32_t>(shape_.tokens);
  params.top_k = static_cast<int32_t>(shape_.top_k);
  params.columns = static_cast<int32_t>(shape_.hidden);
  list_.add(kernel, ceil_div(shape_.tokens, kernel.threads / 32), &params, is_dependent());
}

void BackwardCall::add_gated() {
  GemmParams& params = gated_->params;
  set_layer(params, shape_, sorted_);
  set_operands(params, sorted_rows(rows_, shape_.hidden), dz_, 2 * shape_.intermediate);
  params.preactivation = arguments_.preactivation.data();
  params.weighted_activation = weighted_activation_;
  params.row_dots = row_dots_;
  gated_->add(list_, is_dependent());
}

void BackwardCall::add_weight_gradient(GroupedGemm& product, const Rows& n_rows, const Rows& k_rows,
                                       const Tensor& gradient) {
  set_layer(product.params, shape_, sorted_);
  set_weight_gradient(product.params, shape_, n_rows, k_rows, gradient);
  product.add(list_, is_dependent());
}

void BackwardCall::add_rows_of_dx() {
  set_layer(dx_->params, shape_, sorted_);
  set_operands(dx_->params, sorted_rows(dz_, 2 * shape_.intermediate), rows_, shape_.hidden);
  dx_->add(list_, is_dependent());
}

void BackwardCall::add_bias_gradient(BiasGradientParams& params, const Rows& rows, const float* row_weights,
                                     const Tensor& gradient) {
  if (!gradient.is_given()) return;
  constexpr int64_t kColumnsPerBlock = 64;
  params = bias_gradient_params(shape_, sorted_, rows, row_weights, gradient);
  list_.add(select_op(request_, Op::kBiasGradient), shape_.experts * ceil_div(rows.columns, kColumnsPerBlock), &params,
            is_dependent());
}

void BackwardCall::run() {
  allocate();
  const Rows dz = sorted_rows(dz_, 2 * shape_.intermediate), gathered = sorted_rows(rows_, shape_.hidden);
  if (gated_.has_value()) {
    add_gather(dout_rows_, operands_.dout);
    add_gated();
  }
  if (dw2_.has_value()) {
    add_weight_gradient(*dw2_, gathered, sorted_rows(weighted_activation_, shape_.intermediate), gradients_.dw2);
  }
  if (dx_.has_value()) add_rows_of_dx();
  if (needs_rows(arguments_)) {
    combine_ = combine_backward_params(shape_, sorted_, gradients_, operands_.b2, operands_.dout, rows_, row_dots_,
                                       kDotColumns);
    add_combine(list_, select_op(request_, Op::kCombineBackward), combine_, is_dependent());
  }
  if (dw13_.has_value()) {
    add_gather(x_rows_, operands_.x);
    add_weight_gradient(*dw13_, dz, gathered, gradients_.dw13);
  }
  add_bias_gradient(db13_, dz, /*row_weights=*/nullptr, gradients_.db13);
  add_bias_gradient(db2_, token_rows(operands_.dout, sorted_.row_slots), sorted_.row_weights, gradients_.db2);
  list_.run();
  if (gated_.has_value()) host::set_last_kernel(gated_->kernel().symbol);
}

}  // namespace

void layer_backward_cuda(const LayerBackwardArguments& arguments, const LayerGradients& gradients) {
  BackwardCall(arguments, gradients).run();
}

}  // namespace flashmoe::moe
