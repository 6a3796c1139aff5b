"""The names of dtypes that problems use, and torch's own."""

import torch

TORCH_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
