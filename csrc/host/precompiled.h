// Standard, CUDA and torch headers that take half of the compilation of most host files: the build parses them once and
// includes them in every file first. A file still includes what it needs. (No `#pragma once`: g++ treats this as a main
// file, and warns.)

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <cuda.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
