"""The dtype names that problems use, and torch's dtypes."""

import torch

TORCH_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
