// Which instruction set's kernel runs.
#pragma once

#include "kernel.h"

namespace flashmoe {
namespace cpu {

// The kernel of selected_isa().
const Kernel& selected_kernel();

}  // namespace cpu
}  // namespace flashmoe
