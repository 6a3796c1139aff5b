// Which kernel serves a problem on a GPU. Pure: numbers in, a choice or an explained refusal out.
#pragma once

#include <vector>

#include "attention/host/axes.h"
#include "host/kernel_table.h"

namespace flashmoe {
namespace host {

using attention::Mask;

struct SelectorInput {
  int32_t capability;  // of the GPU, 10 * major + minor
  int32_t num_multiprocessors;
  const char* gpu_name;
  const char* forced_family;  // null: the best that the GPU has
  Dtype dtype;
  Mask mask;
  int32_t head_dim;  // the tensor's, 1 to 256
  int64_t batch;
  int64_t heads_q;
  int64_t heads_kv;
  int64_t seq_q;
  int64_t seq_k;
};

struct Choice {
  const Kernel* forward = nullptr;
  const Kernel* combine = nullptr;  // adds up the partial results when num_splits > 1
  int32_t num_splits = 1;
};

using KernelList = std::vector<const Kernel*>;

// One family's kernels for a dtype, mask and head dim; null where it has none.
struct FamilyKernels {
  const char* family;
  const Kernel* standard;  // never null
  const Kernel* shorter;   // "m128": for the last wave
  const Kernel* early;     // "short": for short sequences
  const Kernel* small;     // "m64": for fewer query tiles than multiprocessors
  const Kernel* split;     // the keys of a query tile divided over several blocks ...
  const Kernel* combine;   // ... and their partial results added up
};

using FamilyList = std::vector<FamilyKernels>;  // best first

// Whether a GPU of this capability can load the binary: machine code runs on its own major version from its minor
// version on, arch-specific code on exactly its capability, PTX on everything from its capability on.
bool can_load(const DeviceBinary& binary, int32_t capability);

// What a GPU of this capability can run: of each kernel the best binary (machine code made for it, then for an older
// minor version, then PTX).
KernelList loadable_kernels(int32_t capability, const KernelTable& table);

// The families that serve (capability, dtype, mask, head_dim) of `input`; the rest of it is not looked at.
FamilyList resolve_families(const SelectorInput& input, const KernelList& loadable, const KernelTable& table);

// `families`: resolve_families of this input.
// Throws code `gpu` when no embedded kernel runs on this GPU, `dtype` for bf16 below compute capability 8.0, and
// `argument` for a forced family that does not exist or does not run here.
Choice select_forward(const SelectorInput& input, const FamilyList& families, const KernelTable& table);

}  // namespace host
}  // namespace flashmoe
