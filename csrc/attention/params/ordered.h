// What the host knows of the kernel attention_decode_values besides its params.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

constexpr int32_t kValueColumns = 32;  // columns of the output per block

}  // namespace flashmoe::attention
