// From the arguments of ragged, paged and banded attention to what a kernel is launched with.
#pragma once

#include "attention/host/varlen_arguments.h"

namespace flashmoe {
namespace attention {

// Whether the rows are one for each entry, in the entries' order.
bool has_one_row_each(const VarlenArguments& arguments);

// One row for each entry: ragged rows become dense ones, of which lse is [batch, heads_q], and the query heads that share a key head
// become the rows of that one position (Band::folded_heads), so that their keys are read once.
void fold_heads(ForwardParams& params);

// Row blocks that all entries have together, for one head, at most; the lengths are in device memory.
int64_t most_row_blocks(const ForwardParams& params, int64_t block_m);

}  // namespace attention
}  // namespace flashmoe
