// The schemas of attention's operators, separate from their implementations so that a test can register only the
// schemas.
#pragma once

namespace flashmoe::attention {

template <class Library>
void define_dense(Library& library) {
  library.def(
      "flash_attention_forward(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor out, Tensor lse)");
  // Called if no gradient can be needed. Omitting lse saves one allocation, and without an autograd rule in Python a
  // call costs half the CPU time. What Python does not have to compute (the default scale 1 / sqrt(head_dim), sizes)
  // saves a few percent more.
  library.def("_flash_attention_inference(Tensor q, Tensor k, Tensor v, float? scale, bool causal) -> Tensor");
  // For scaled_dot_product_attention; returns None if SDPA means something else for these arguments.
  library.def(
      "_flash_attention_drop_in(Tensor q, Tensor k, Tensor v, float? scale, bool causal, bool enable_gqa) -> Tensor?");
}

template <class Library>
void define_varlen(Library& library) {
  // q [tokens, heads_q, head_dim] with cu_seqlens_q, else [batch, heads_q, length, head_dim]. k and v have the same
  // layouts with or without cu_seqlens_k, or are pages [pages, page_size, heads_kv, head_dim] with block_table and
  // seqused_k. Windows count keys; -1 means no limit. SymInt: code that torch.compile generated for one batch also runs
  // others, whose longest sequences may have any length.
  library.def(
      "attention_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? "
      "seqused_k, Tensor? block_table, Tensor? sinks, Tensor? mask, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap, int num_splits) -> (Tensor out, Tensor lse)");
  // Used if no gradient can be needed: one allocation less, no Python.
  library.def(
      "_attention_varlen_inference(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? "
      "seqused_k, Tensor? block_table, Tensor? sinks, Tensor? mask, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap, int num_splits) -> Tensor");
  // The same, written to out, which must not overlap any other tensor of the call.
  library.def(
      "_attention_varlen_out(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
      "Tensor? seqused_k, Tensor? block_table, Tensor? sinks, Tensor? mask, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap, int num_splits) -> ()");
  // scale must be above zero. needs: bits, 1 for dq, 2 for dk, 4 for dv; None for the others. row_dot, only from CUDA
  // kernels: rowsum(grad_out * out) - grad_lse.
  library.def(
      "_attention_varlen_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? "
      "cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? sinks, Tensor? mask, Tensor out, Tensor lse, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int window_left, int window_right, float softcap, "
      "int needs=7) -> (Tensor? dq, Tensor? dk, Tensor? dv, Tensor? row_dot)");
  // The same for dense attention with an additive mask. Bit 16 of `needs` asks for the mask's gradient, which may be
  // padded to a few more keys. It is returned only if the kernel for the other gradients stores that of the scores: for
  // full attention, if that gradient takes up to 1 GiB or has the size of the mask. CUDA only.
  library.def(
      "_attention_mask_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? "
      "cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? sinks, Tensor? mask, Tensor out, Tensor lse, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int window_left, int window_right, float softcap, "
      "int needs) -> (Tensor? dq, Tensor? dk, Tensor? dv, Tensor? row_dot, Tensor? dmask)");
  // With dropout of the probabilities, from the seed and offset in rng_state, int64 [2]. No pages.
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
  // For an additive mask [batch or 1, heads_q or 1, rows or 1, keys or 1], with row_dot from the operators above.
  // Returns float32 sums [splits, ...] whose sum over dimension 0, and over every dimension in which the mask has one
  // element, is its gradient; or, with one split, the gradient itself in the mask's type. scale must be above zero.
  // CUDA only.
  library.def(
      "_attention_bias_gradient(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor lse, Tensor "
      "row_dot, float scale, int window_left, int window_right, float softcap, float dropout_p, Tensor? rng_state) -> "
      "Tensor");
  // k and v in float8_e4m3fn, multiplied by factor * scale. A scale is float32 [], [heads_kv], [batch, heads_kv], or
  // has four dimensions and is broadcast to the cache. No gradient.
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
  // q, k and v in float8_e4m3fn, [batch, heads, length, head_dim], multiplied by factor * scale. A scale is float32 [],
  // [heads] or [batch, heads]. Only on GPUs of compute capability 9.0; no gradient. out is float16 or bfloat16.
  library.def(
      "attention_fp8_forward(Tensor q, Tensor k, Tensor v, float scale, bool causal, bool is_float16, Tensor? q_scale, "
      "Tensor? k_scale, Tensor? v_scale, float q_factor, float k_factor, float v_factor) -> (Tensor out, Tensor lse)");
  // The same for ragged batches, laid out as in attention_varlen_forward; scales may also be [sequences, heads], but
  // not per block.
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
