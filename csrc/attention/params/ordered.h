// What the host knows of the kernel attention_decode_values beside its params.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

constexpr int32_t kValueColumns = 32;  // of the output, of a block

}  // namespace flashmoe::attention
