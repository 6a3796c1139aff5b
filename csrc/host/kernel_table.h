// The kernels that this library holds. The arrays behind it are generated from csrc/tables/arch.toml and each operation's
// operations.toml and kernels.toml.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashmoe::host {

enum class Dtype : uint8_t { kFloat16, kBFloat16, kFloat32 };

constexpr int32_t kMaxAxes = 4;
constexpr int32_t kMaxCosts = 4;

// One embedded device binary: machine code of one target, or PTX.
struct DeviceBinary {
  const char* name;
  const char* target;          // "sm_90a", "compute_80", ...
  int32_t capability;          // 10 * major + minor
  int32_t virtual_capability;  // of the PTX that it was made from: what __CUDA_ARCH__ was, at most `capability`
  bool is_arch_specific;
  bool is_ptx;
  uint64_t offset;  // into the section .flashmoe.cubins
  uint64_t size;
};

struct Kernel {
  const char* operation;
  const char* family;
  const char* variant;  // "" for the family's standard tile
  const char* symbol;
  Dtype dtype;
  int32_t
      axes[kMaxAxes];  // in the order of the operation's descriptor: a number, or the index of a word; -1 past the last
  int32_t block_m;
  int32_t block_n;
  int32_t threads;
  int32_t min_blocks;
  int32_t shared_bytes;     // dynamic
  int32_t num_tensor_maps;  // that the kernel takes after its parameters
  bool is_persistent;
  bool has_cost;
  double cost[kMaxCosts];  // in the order of the operation's descriptor
  int32_t binary;          // index into binaries()
};

struct GpuFamilies {
  int32_t capability;
  const char* families[4];  // best first, null-terminated
};

struct KernelTable {
  const DeviceBinary* binaries;
  int32_t num_binaries;
  const Kernel* kernels;
  int32_t num_kernels;
  const GpuFamilies* gpus;
  int32_t num_gpus;
};

const KernelTable& kernel_table();

// First byte of the embedded binaries.
const unsigned char* embedded_binaries();

// The JSON in the section .flashmoe.index, NUL-terminated.
const char* embedded_index();

}  // namespace flashmoe::host
