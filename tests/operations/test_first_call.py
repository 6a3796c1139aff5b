"""Each public function as the first call of a process: nothing else has loaded the extension before."""

import inspect
import subprocess
import sys
from pathlib import Path

import flashmoe
from tests.forked_python import SAFE_PATH

_Q = "torch.ones(1, 4, 2, 16)"
_PACKED = "torch.ones(4, 2, 16)"
_OFFSETS = "torch.tensor([0, 4], dtype=torch.int32)"
_LATENTS = "torch.ones(1, 16, 576).bfloat16()"
_LENGTHS = "cache_seqlens=torch.tensor([4], dtype=torch.int32)"
_CALLS = {
    "activate": "()",
    "activated": "()",
    "attention": f"({_Q}, {_Q}, {_Q})",
    "attention_varlen": f"({_PACKED}, {_PACKED}, {_PACKED}, {_OFFSETS}, {_OFFSETS}, 4, 4)",
    "attention_with_kvcache": f"(torch.ones(1, 4, 1, 16), {_Q}, {_Q}, cache_seqlens=torch.tensor([2], dtype=torch.int32))",
    "deactivate": "()",
    "dropout_mask": "(torch.tensor([7, 0]), 0.5, 1, 2, 4, 4)",
    "explain": f"({_Q}, {_Q}, {_Q})",
    "fused_moe": "(torch.ones(3, 16), torch.ones(2, 32, 16), torch.ones(2, 16, 16), torch.ones(3, 1), torch.zeros(3, 1).int())",
    "grouped_mm": "(torch.ones(3, 16), torch.ones(2, 16, 16), torch.tensor([1, 3], dtype=torch.int32))",
    "is_active": "()",
    "linear": "(torch.ones(3, 16), torch.ones(8, 16))",
    "merge_attention": f"({_Q}, torch.ones(1, 4, 2), {_Q}, torch.ones(1, 4, 2))",
    "mla_append": f"(torch.ones(1, 1, 576).bfloat16(), torch.zeros(1, 64, 656, dtype=torch.uint8), {_LENGTHS})",
    "mla_decode": f"(torch.ones(1, 1, 2, 576).bfloat16(), {_LATENTS}, {_LENGTHS}, scale=0.1)",
    "pack_mxfp4": "(torch.zeros(2, 64, 32, dtype=torch.uint8), torch.zeros(2, 64, 2, dtype=torch.uint8))",
    "patch_linear": "(torch.nn.Sequential(torch.nn.Linear(16, 8)))",
    "quantize_weights": "(torch.ones(2, 128, 128).bfloat16())",
    "scaled_dot_product_attention": f"({_Q}, {_Q}, {_Q})",
    "smooth_keys": f"({_Q})",
    "topk_route": "(torch.ones(3, 4), 2)",
}
_EACH_FIRST = """
import os, sys, traceback
import torch
import flashmoe
failed = []
for call in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            eval(call)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        failed.append(call)
if failed:
    sys.exit("failed as the first call of a process:\\n" + "\\n".join(failed))
"""


def test_every_public_function_works_as_the_first_call_of_a_process(tmp_path: Path) -> None:
    functions = {name for name in flashmoe.__all__ if inspect.isfunction(getattr(flashmoe, name))}
    assert functions == set(_CALLS), "a function that is new here needs a call; one that left takes its call with it"
    command = [
        sys.executable,
        *SAFE_PATH,
        "-c",
        _EACH_FIRST,
        *(f"flashmoe.{name}{call}" for name, call in _CALLS.items()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
