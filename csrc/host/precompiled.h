// The headers of others that take most host files half of their compilation: the build parses them once and gives them to every
// file first. A file still includes what it needs. (No `#pragma once`: g++ takes this for a main file, and warns.)

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <cuda.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
