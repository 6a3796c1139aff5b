#include "attention/host/streamed_mask.h"

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

// Whether the fused backward kernel may skip what the mask hides from a tile. Its ranks assume that a tile otherwise
// sees all rows, and that the heads of a group share a matrix.
bool may_skip_tiles(const VarlenArguments& arguments, const OwnMatrices& own) {
  return arguments.window_left < 0 && arguments.window_right < 0 && !VarlenArguments::has(arguments.seqused_k) &&
         ceil_div(arguments.max_seqlen_k, int64_t{kMaskTileKeys}) <= kMaxMaskTiles &&
         (own.sizes[1] == 1 || arguments.heads_q() == arguments.heads_kv());
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

StreamedMask streamed_mask(const VarlenArguments& arguments, bool has_tiles) {
  StreamedMask streamed;
  const Tensor& mask = arguments.mask;
  if (!is_bool(mask)) {
    streamed.mask = host::alias(mask);
    return streamed;
  }
  const OwnMatrices own(arguments);
  const int64_t rows = own.sizes[2], keys = own.sizes[3], padded_keys = own.padded_keys();
  const int64_t row_blocks = ceil_div(rows, int64_t{kMaskBlock});
  const int64_t key_words = ceil_div(keys, int64_t{kMaskBlock} * kMaskWordBlocks);
  const int64_t words = own.count() * row_blocks * key_words;
  const int64_t tiles = has_tiles && may_skip_tiles(arguments, own) ? ceil_div(keys, int64_t{kMaskTileKeys}) : 0;
  const int64_t ranges = own.count() * tiles * 2;
  const Tensor padded = host::empty({own.sizes[0], own.sizes[1], rows, padded_keys}, arguments.torch_dtype,
                                    arguments.device_type, arguments.device_index);
  streamed.mask = host::view_of(padded, own.sizes, padded.strides());
  streamed.blocks_memory = host::empty({ranges + words + own.count() * tiles * row_blocks}, aoti_torch_dtype_int32(),
                                       arguments.device_type, arguments.device_index);
  auto* ints = static_cast<int32_t*>(streamed.blocks_memory.data());  // ranges, pairs, come first: they are aligned
  const BoolMaskParams params{mask.data(),
                              padded.data(),
                              ints + ranges,
                              own.strides[0],
                              own.strides[1],
                              own.strides[2],
                              own.strides[3],
                              static_cast<int32_t>(padded_keys),
                              static_cast<int32_t>(own.sizes[1]),
                              static_cast<int32_t>(rows),
                              static_cast<int32_t>(keys)};
  const VisibleBlocks blocks{params.words, static_cast<int32_t>(row_blocks), static_cast<int32_t>(key_words),
                             own.sizes[0] > 1 ? params.heads : 0, own.sizes[1] > 1 ? 1 : 0};
  const BoolMaskTilesParams tiles_params{blocks, ints, ints + ranges + words, static_cast<int32_t>(tiles)};
  const host::Device& gpu = host::device(arguments.device_index);
  const host::KernelRequest request = host::make_request(gpu, arguments.dtype);
  host::LaunchList list;
  list.add({&select_bool_mask(request), words, &params, nullptr, /*is_dependent=*/false});
  streamed.blocks = blocks;
  if (tiles > 0) {
    list.add({&select_bool_mask_tiles(request), own.count() * tiles, &tiles_params, nullptr, /*is_dependent=*/false});
    streamed.tiles = {tiles_params.ranges, tiles_params.ranks,  tiles_params.tiles,
                      blocks.row_blocks,   blocks.per_sequence, blocks.per_head};
  }
  list.run(host::CudaCall(gpu));
  return streamed;
}

}  // namespace flashmoe::attention
