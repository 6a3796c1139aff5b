// The schemas of attention's operators. Apart from what implements them: a test registers them without.
#pragma once

namespace flashmoe::attention {

template <class Library>
void define_dense(Library& library) {
  library.def(
      "flash_attention_forward(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor out, Tensor lse)");
  // Called where no gradient can be wanted. Without lse there is one allocation less, and without an autograd rule in
  // Python a call costs half the CPU time; what Python need not look at (the default scale 1 / sqrt(head_dim), sizes)
  // saves some percent more.
  library.def("_flash_attention_inference(Tensor q, Tensor k, Tensor v, float? scale, bool causal) -> Tensor");
  // For scaled_dot_product_attention; None where that means another thing.
  library.def(
      "_flash_attention_drop_in(Tensor q, Tensor k, Tensor v, float? scale, bool causal, bool enable_gqa) -> Tensor?");
}

template <class Library>
void define_varlen(Library& library) {
  // q [tokens, heads_q, head_dim] with cu_seqlens_q, else [batch, heads_q, length, head_dim]; k and v likewise with cu_seqlens_k, or
  // pages [pages, page_size, heads_kv, head_dim] with block_table and seqused_k. Windows count keys; -1 is no limit. SymInt: code that
  // torch.compile made for one batch serves others, whose longest sequences are as long as they like.
  library.def(
      "attention_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? "
      "seqused_k, Tensor? block_table, Tensor? sinks, Tensor? mask, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap, int num_splits) -> (Tensor out, Tensor lse)");
  // Where no gradient can be wanted: one allocation less, no Python.
  library.def(
      "_attention_varlen_inference(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? "
      "seqused_k, Tensor? block_table, Tensor? sinks, Tensor? mask, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap, int num_splits) -> Tensor");
  // The same into out, which no other tensor of the call lies in.
  library.def(
      "_attention_varlen_out(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
      "Tensor? seqused_k, Tensor? block_table, Tensor? sinks, Tensor? mask, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap, int num_splits) -> ()");
  // scale is above zero. needs: bits, 1 for dq, 2 for dk, 4 for dv; None for the others. row_dot, of CUDA kernels alone:
  // rowsum(grad_out * out) - grad_lse.
  library.def(
      "_attention_varlen_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? "
      "cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? sinks, Tensor? mask, Tensor out, Tensor lse, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int window_left, int window_right, float softcap, "
      "int needs=7) -> (Tensor? dq, Tensor? dk, Tensor? dv, Tensor? row_dot)");
  // The same of dense attention with an additive mask, and with bit 16 the mask's gradient, with keys or a few more, where the kernel of the others
  // stores that of the scores: of full attention in tensors of up to 1 GiB, or as large as the mask. CUDA alone.
  library.def(
      "_attention_mask_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? "
      "cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? sinks, Tensor? mask, Tensor out, Tensor lse, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int window_left, int window_right, float softcap, "
      "int needs) -> (Tensor? dq, Tensor? dk, Tensor? dv, Tensor? row_dot, Tensor? dmask)");
  // With dropout of the probabilities, by the seed and offset of rng_state, int64 [2]. Without pages.
  library.def(
      "attention_dropout_forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? "
      "seqused_k, Tensor? block_table, Tensor? sinks, Tensor? mask, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap, int num_splits, float dropout_p, Tensor "
      "rng_state) -> (Tensor out, Tensor lse)");
  library.def(
      "_attention_dropout_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? "
      "cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? sinks, Tensor? mask, Tensor out, Tensor lse, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int window_left, int window_right, float softcap, "
      "int needs, float dropout_p, Tensor rng_state) -> (Tensor? dq, Tensor? dk, Tensor? dv, Tensor? row_dot)");
  // Of an additive mask [batch or 1, heads_q or 1, rows or 1, keys or 1], with row_dot of the operators above: float32 sums [parts, ...]
  // that add up to its gradient in dimension 0 and wherever the mask has one element; or of one part in the mask's type, the gradient
  // itself. scale is above zero. CUDA alone.
  library.def(
      "_attention_bias_gradient(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor lse, Tensor "
      "row_dot, float scale, int window_left, int window_right, float softcap, float dropout_p, Tensor? rng_state) -> "
      "Tensor");
  // k and v in float8_e4m3fn, times factor times scale: float32 [], [heads_kv], [batch, heads_kv], or of four dimensions, broadcast to the
  // cache. No gradient.
  library.def(
      "attention_e4m3_forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? "
      "seqused_k, Tensor? block_table, Tensor? sinks, Tensor? mask, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap, int num_splits, Tensor? k_scale, Tensor? "
      "v_scale, "
      "float k_factor, float v_factor) -> (Tensor out, Tensor lse)");
  library.def(
      "_attention_e4m3_inference(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? "
      "seqused_k, Tensor? block_table, Tensor? sinks, Tensor? mask, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap, int num_splits, Tensor? k_scale, Tensor? "
      "v_scale, "
      "float k_factor, float v_factor) -> Tensor");
  library.def(
      "_attention_e4m3_out(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
      "Tensor? seqused_k, Tensor? block_table, Tensor? sinks, Tensor? mask, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap, int num_splits, Tensor? k_scale, Tensor? "
      "v_scale, float k_factor, float v_factor) -> ()");
  // q, k and v in float8_e4m3fn, [batch, heads, length, head_dim], times factor times scale: float32 [], [heads] or [batch, heads]. On GPUs
  // of compute capability 9.0 alone; without gradient. out is float16 or bfloat16.
  library.def(
      "attention_fp8_forward(Tensor q, Tensor k, Tensor v, float scale, bool causal, bool is_float16, Tensor? q_scale, "
      "Tensor? k_scale, Tensor? v_scale, float q_factor, float k_factor, float v_factor) -> (Tensor out, Tensor lse)");
  // The same of ragged batches, as attention_varlen_forward has them: scales also [sequences, heads], none of blocks.
  library.def(
      "attention_fp8_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? "
      "seqused_k, int max_seqlen_q, int max_seqlen_k, float scale, bool causal, bool is_float16, Tensor? q_scale, "
      "Tensor? k_scale, Tensor? v_scale, float q_factor, float k_factor, float v_factor) -> (Tensor out, Tensor lse)");
  library.def(
      "attention_append_e4m3_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor "
      "cache_seqlens, "
      "Tensor? block_table, Tensor? k_scale, Tensor? v_scale, float k_factor, float v_factor) -> ()");
  library.def(
      "attention_append_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor cache_seqlens, "
      "Tensor? block_table) -> ()");
}

}  // namespace flashmoe::attention
