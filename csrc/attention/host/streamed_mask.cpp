#include "attention/host/streamed_mask.h"

#include <initializer_list>

#include "attention/host/select.h"
#include "host/ceil_div.h"
#include "host/copies.h"
#include "host/launch.h"

namespace flashmoe::attention {
namespace {

bool is_bool(const Tensor& mask) { return mask.dtype() == aoti_torch_dtype_bool(); }

// The distinct matrices of rows and keys in a mask: sequences and heads that share one count once.
struct OwnMatrices {
  int64_t sizes[4];
  int64_t strides[4];

  explicit OwnMatrices(const VarlenArguments& arguments)
      : sizes{1, 1, arguments.max_seqlen_q, arguments.max_seqlen_k}, strides{} {
    for (int axis = 0; axis < 4; ++axis) {
      const int64_t size = arguments.mask.sizes()[axis], stride = arguments.mask.strides()[axis];
      if (size == 1 || stride == 0) continue;
      sizes[axis] = size;
      strides[axis] = stride;
    }
  }
  int64_t count() const { return sizes[0] * sizes[1]; }
  int64_t padded_keys() const { return ceil_div(sizes[3], host::kRowAlignElements) * host::kRowAlignElements; }
};

// H200, 16 heads of 2048 rows, 4 sequences, with a random matrix per sequence and head, which is the least favourable
// case: forward 403 us instead of 594 (D=64) and 491 instead of 674 (D=128), backward 648 instead of 1078 and 938
// instead of 1457. The price is memory.
bool is_made_additive(const VarlenArguments& arguments) {
  constexpr int64_t kMostBytes = int64_t{1} << 30;
  const OwnMatrices own(arguments);
  return own.count() * own.sizes[2] * own.padded_keys() * host::kElementBytes <= kMostBytes;
}

Tensor empty_ints(const VarlenArguments& arguments, std::initializer_list<int64_t> sizes) {
  return host::empty(sizes, aoti_torch_dtype_int32(), arguments.device_type, arguments.device_index);
}

// Whether the fused backward kernel may skip what the mask hides from a tile. Its ranks assume that a tile otherwise
// sees all rows, and that the heads of a group share a matrix.
bool has_visible_tiles(const VarlenArguments& arguments, const StreamedMask& streamed) {
  return streamed.blocks.words != nullptr && arguments.window_left < 0 && arguments.window_right < 0 &&
         !VarlenArguments::has(arguments.seqused_k) &&
         ceil_div(arguments.max_seqlen_k, int64_t{kMaskTileKeys}) <= kMaxMaskTiles &&
         (streamed.blocks.per_head == 0 || arguments.heads_q() == arguments.heads_kv());
}

}  // namespace

bool streams_mask(const VarlenArguments& arguments) {
  const Tensor& mask = arguments.mask;
  if (!VarlenArguments::has(mask) || has_alibi(arguments) || has_softcap(arguments) || mask.dim() != 4) return false;
  if (VarlenArguments::has(arguments.cu_seqlens_q) || VarlenArguments::has(arguments.cu_seqlens_k)) return false;
  if (is_bool(mask)) return is_made_additive(arguments);
  const int64_t *sizes = mask.sizes(), *strides = mask.strides();
  const auto is_aligned = [](int64_t stride) { return stride >= 0 && stride % host::kRowAlignElements == 0; };
  return sizes[2] == arguments.max_seqlen_q && sizes[3] == arguments.max_seqlen_k && strides[3] == 1 &&
         strides[2] > 0 && is_aligned(strides[2]) && (sizes[1] == 1 || is_aligned(strides[1])) &&
         (sizes[0] == 1 || is_aligned(strides[0])) &&
         reinterpret_cast<uintptr_t>(mask.data()) % (2 * host::kRowAlignElements) == 0;
}

StreamedMask streamed_mask(const VarlenArguments& arguments) {
  StreamedMask streamed;
  const Tensor& mask = arguments.mask;
  if (!is_bool(mask)) {
    streamed.mask = host::alias(mask);
    return streamed;
  }
  const OwnMatrices own(arguments);
  const int64_t rows = own.sizes[2], keys = own.sizes[3];
  const int64_t padded_keys = own.padded_keys();
  const int64_t row_blocks = ceil_div(rows, int64_t{kMaskBlock});
  const int64_t key_words = ceil_div(keys, int64_t{kMaskBlock} * kMaskWordBlocks);
  const Tensor padded = host::empty({own.sizes[0], own.sizes[1], rows, padded_keys}, arguments.torch_dtype,
                                    arguments.device_type, arguments.device_index);
  streamed.mask = host::view_of(padded, own.sizes, padded.strides());
  streamed.words = empty_ints(arguments, {own.count(), row_blocks, key_words});
  const BoolMaskParams params{mask.data(),
                              padded.data(),
                              static_cast<int32_t*>(streamed.words.data()),
                              own.strides[0],
                              own.strides[1],
                              own.strides[2],
                              own.strides[3],
                              static_cast<int32_t>(padded_keys),
                              static_cast<int32_t>(own.sizes[1]),
                              static_cast<int32_t>(rows),
                              static_cast<int32_t>(keys)};
  streamed.blocks = {params.words, static_cast<int32_t>(row_blocks), static_cast<int32_t>(key_words),
                     own.sizes[0] > 1 ? params.heads : 0, own.sizes[1] > 1 ? 1 : 0};
  const host::Device& gpu = host::device(arguments.device_index);
  const Kernel& kernel = select_bool_mask(host::make_request(gpu, arguments.dtype));
  host::LaunchList list;
  list.add({&kernel, own.count() * row_blocks * key_words, &params, nullptr, /*is_dependent=*/false});
  list.run(host::CudaCall(gpu));
  return streamed;
}

StreamedMask streamed_mask_of_tiles(const VarlenArguments& arguments) {
  StreamedMask streamed = streamed_mask(arguments);
  if (!has_visible_tiles(arguments, streamed)) return streamed;
  const VisibleBlocks& blocks = streamed.blocks;
  const int64_t matrices = streamed.words.sizes()[0];
  const int64_t tiles = ceil_div(arguments.max_seqlen_k, int64_t{kMaskTileKeys});
  streamed.ranges = empty_ints(arguments, {matrices, tiles, 2});
  streamed.ranks = empty_ints(arguments, {matrices, tiles, blocks.row_blocks});
  const BoolMaskTilesParams params{blocks, static_cast<int32_t*>(streamed.ranges.data()),
                                   static_cast<int32_t*>(streamed.ranks.data()), static_cast<int32_t>(tiles)};
  streamed.tiles = {params.ranges,     params.ranks,        params.tiles,
                    blocks.row_blocks, blocks.per_sequence, blocks.per_head};
  const host::Device& gpu = host::device(arguments.device_index);
  const Kernel& kernel = select_bool_mask_tiles(host::make_request(gpu, arguments.dtype));
  host::LaunchList list;
  list.add({&kernel, matrices * tiles, &params, nullptr, /*is_dependent=*/false});
  list.run(host::CudaCall(gpu));
  return streamed;
}

}  // namespace flashmoe::attention
