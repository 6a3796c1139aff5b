// The backward pass of a layer in e4m3, and the conversion of its weights from 16 bits, on a GPU, launched as lists.
#include <optional>

#include "host/last_kernel.h"
#include "moe/host/backends.h"
#include "moe/host/scaled.h"
#include "moe/params/training.h"

namespace flashmoe::moe {
namespace {

// e4m3 values and their scales in a workspace.
struct Operand {
  int64_t values = 0;
  int64_t scales = 0;

  Operand(host::Workspace& workspace, int64_t values_count, int64_t scales_count)
      : values(workspace.add<uint8_t>(values_count)), scales(workspace.add<float>(scales_count)) {}
};

class ScaledBackwardCall {
 public:
  ScaledBackwardCall(const ScaledBackwardArguments& arguments, const LayerGradients& gradients)
      : arguments_(arguments),
        gradients_(gradients),
        shape_(arguments.shape),
        gpu_(host::device(arguments.common.device_index)),
        request_(host::make_request(gpu_, arguments.common.dtype)),
        dout_(loadable_rows(arguments.dout)),
        x_(loadable_rows(arguments.x)),
        sorted_(pointers_of(arguments.sorted)),
        blocks_(padded_blocks(shape_.slots, shape_.experts)),
        call_(gpu_),
        list_(call_) {}

  void run();

 private:
  bool needs_rows() const { return (arguments_.needs & (kNeedX | kNeedWeights)) != 0; }
  int64_t padded() const { return blocks_ * kScaleBlock; }
  // One scale per 128 values of a row; per 128 rows of a column; per 128 rows by 128 columns.
  Operand rows_operand(int64_t columns) {
    return {workspace_, shape_.slots * columns, shape_.slots * columns / kScaleBlock};
  }
  Operand columns_operand(int64_t columns) { return {workspace_, columns * padded(), blocks_ * columns}; }
  Operand tiles_operand(int64_t columns) { return {workspace_, columns * padded(), blocks_ * columns / kScaleBlock}; }

  uint8_t* values(const Operand& operand) const { return workspace_.address<uint8_t>(operand.values); }
  float* scales(const Operand& operand) const { return workspace_.address<float>(operand.scales); }

  void add_tiles(QuantizeTilesParams& params, Op op, const Tensor& tokens) {
    params.x = tokens.data();
    params.x_stride = tokens.strides()[0];
    params.expert_offsets = sorted_.expert_offsets;
    params.row_slots = sorted_.row_slots;
    params.transposed_stride = padded();
    params.experts = static_cast<int32_t>(shape_.experts);
    params.top_k = static_cast<int32_t>(shape_.top_k);
    params.columns = static_cast<int32_t>(shape_.hidden);
    list_.add(select_op(request_, op), blocks_ * (shape_.hidden / kScaleBlock), &params, !list_.is_empty());
  }

  void add_product(ScaledGemm& product, const Operand& a, int64_t k, void* d, int64_t n) {
    set_layer(product.params.gemm, shape_, sorted_);
    set_scaled_operands(product.params, sorted_rows(values(a), k), scales(a), d, n);
    product.add(list_);
  }

  void add_weight_gradient(std::optional<ScaledGemm>& product, const Operand& a, const Operand& b,
                           const Tensor& gradient) {
    const int64_t* sizes = gradient.sizes();
    product.emplace(Product::kScaledWeightGradient,
                    select_product({request_, Product::kScaledWeightGradient, WeightLayout::kNk, shape_.slots,
                                    shape_.experts, sizes[1], sizes[2]}));
    ScaledGemmParams& params = product->params;
    GemmParams& gemm = params.gemm;
    set_layer(gemm, shape_, sorted_);
    gemm.a = values(a);
    gemm.b = values(b);
    gemm.d = gradient.data();
    gemm.a_stride = gemm.b_stride = padded() / 2;
    gemm.d_stride = sizes[2];
    gemm.n = static_cast<int32_t>(sizes[1]);
    gemm.k = static_cast<int32_t>(sizes[2]);
    params.a_scale = scales(a);
    params.b_scale = scales(b);
    product->add(list_);
  }

  const ScaledBackwardArguments& arguments_;
  const LayerGradients& gradients_;
  const LayerShape& shape_;
  const host::Device& gpu_;
  const host::KernelRequest request_;
  const Tensor dout_, x_;
  const Sorted sorted_;
  const int64_t blocks_;  // padded blocks
  const host::CudaCall call_;
  CallList list_;
  host::Workspace workspace_;

  std::optional<ScaledGemm> dw2_, dx_, dw13_;
  QuantizeTilesParams of_dout_{}, of_x_{};
  GatedGradientParams gated_{};
  CombineParams combine_{};
};

void ScaledBackwardCall::run() {
  const int64_t hidden = shape_.hidden, inner = shape_.intermediate;
  ScaledGemm ds =
      make_scaled_gemm(Product::kScaled, request_, shape_.slots, shape_.experts, arguments_.w2, arguments_.w2_scale);
  const bool needs_dw2 = gradients_.dw2.is_given(), needs_dw13 = gradients_.dw13.is_given();

  const Operand dout = rows_operand(hidden), dz = rows_operand(2 * inner);
  const Operand dout_columns = columns_operand(hidden), dz_columns = columns_operand(2 * inner);
  const Operand active = tiles_operand(inner);
  const Operand& x = dout_columns;  // the memory is free: dw2 has been computed when x is converted
  const int64_t s = workspace_.add<uint16_t>(shape_.slots * inner);
  const int64_t dx_rows = workspace_.add<uint16_t>(shape_.slots * hidden);
  const int64_t dots = workspace_.add<float>(shape_.slots * inner / kScaleBlock);
  workspace_.allocate(call_);

  of_dout_.values = values(dout);
  of_dout_.scales = scales(dout);
  if (needs_dw2) {
    of_dout_.transposed = values(dout_columns);
    of_dout_.transposed_scales = scales(dout_columns);
  }
  add_tiles(of_dout_, Op::kQuantizeGradients, dout_);
  add_product(ds, dout, hidden, workspace_.address<void>(s), inner);

  gated_.preactivation = arguments_.preactivation.data();
  gated_.s = workspace_.address<void>(s);
  gated_.row_weights = sorted_.row_weights;
  gated_.expert_offsets = sorted_.expert_offsets;
  if (gradients_.dx.is_given()) {
    gated_.values = values(dz);
    gated_.scales = scales(dz);
  }
  if (needs_dw13) {
    gated_.transposed = values(dz_columns);
    gated_.transposed_scales = scales(dz_columns);
  }
  if (needs_dw2) {
    gated_.activation_transposed = values(active);
    gated_.activation_scales = scales(active);
  }
  gated_.row_dots = workspace_.address<float>(dots);
  gated_.transposed_stride = padded();
  gated_.experts = static_cast<int32_t>(shape_.experts);
  gated_.slots = static_cast<int32_t>(shape_.slots);
  gated_.columns = static_cast<int32_t>(inner);
  gated_.activation = shape_.activation;
  list_.add(select_op(request_, Op::kGatedGradient), blocks_ * (inner / kScaleBlock), &gated_);

  if (needs_dw2) add_weight_gradient(dw2_, dout_columns, active, gradients_.dw2);
  void* const rows = workspace_.address<void>(dx_rows);
  if (gradients_.dx.is_given()) {
    dx_.emplace(make_scaled_gemm(Product::kScaled, request_, shape_.slots, shape_.experts, arguments_.w13,
                                 arguments_.w13_scale));
    add_product(*dx_, dz, 2 * inner, rows, hidden);
  }
  if (needs_rows()) {
    combine_ =
        combine_backward_params(shape_, sorted_, gradients_, Tensor(), dout_, rows, gated_.row_dots, kScaleBlock);
    add_combine(list_, select_op(request_, Op::kCombineBackward), combine_);
  }
  if (needs_dw13) {
    of_x_.transposed = values(x);
    of_x_.transposed_scales = scales(x);
    add_tiles(of_x_, Op::kQuantizeTokens, x_);
    add_weight_gradient(dw13_, dz_columns, x, gradients_.dw13);
  }
  list_.run();
  host::set_last_kernel(ds.kernel().symbol);
}

}  // namespace

void scaled_backward_cuda(const ScaledBackwardArguments& arguments, const LayerGradients& gradients) {
  ScaledBackwardCall(arguments, gradients).run();
}

void quantize_weights_cuda(const QuantizeWeightsArguments& arguments, const QuantizedWeights& outputs) {
  const host::Device& gpu = host::device(arguments.common.device_index);
  const Kernel& kernel = select_op(host::make_request(gpu, arguments.common.dtype), Op::kQuantizeWeights);
  const int64_t* sizes = arguments.weights.sizes();
  QuantizeTilesParams params{};
  params.x = arguments.weights.data();
  params.values = outputs.values.data();
  params.scales = static_cast<float*>(outputs.scales.data());
  params.transposed = outputs.transposed.data();
  params.transposed_scales = static_cast<float*>(outputs.transposed_scales.data());
  params.rows = static_cast<int32_t>(sizes[1]);
  params.columns = static_cast<int32_t>(sizes[2]);
  params.experts = static_cast<int32_t>(sizes[0]);
  const host::CudaCall call(gpu);
  CallList list(call);
  list.add(kernel, sizes[0] * (sizes[1] / kScaleBlock) * (sizes[2] / kScaleBlock), &params, /*is_dependent=*/false);
  list.run();
  host::set_last_kernel(kernel.symbol);
}

}  // namespace flashmoe::moe
