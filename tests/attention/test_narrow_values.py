"""The kernels for values of at most 128 columns with keys of 129 to 192 (MLA's prefill and training), when they are selected."""

import math
import os

import pytest
import torch

import flashmoe
from flashmoe import _extension
from flashmoe_tools.operations.attention.reference import ScoreOptions, attend

from .gradients import make_leaves
from .varlen_reference import Band, Ragged, check_ragged

# batch, heads, key heads, rows, keys, columns of q and k, columns of v
SHAPES = (
    (1, 2, 2, 1100, 1100, 192, 128),
    (2, 4, 1, 300, 565, 192, 128),
    (1, 2, 2, 200, 131, 160, 104),  # columns past the tensors' width, rows that see no key
    (3, 2, 1, 65, 67, 136, 8),
)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_narrow_kernels(causal: bool) -> None:
    """Both passes within twice the error of 16-bit torch, with the same bits on every run, in poisoned memory."""
    if torch.cuda.get_device_capability() != (9, 0) or os.environ.get("FLASHMOE_KERNEL") not in (None, "", "sm90"):
        pytest.skip("not run: only compute capability 9.0 has these kernels")
    for seed, (batch, heads, heads_kv, rows, keys, columns, values) in enumerate(SHAPES):
        dtype = (torch.bfloat16, torch.float16)[seed % 2]
        torch.manual_seed(seed)
        sizes = ((heads, rows, columns), (heads_kv, keys, columns), (heads_kv, keys, values))
        tensors = [torch.randn(batch, *size, device="cuda").to(dtype) for size in sizes]
        grad_out = torch.randn(batch, heads, rows, values, device="cuda").to(dtype)
        poison = [torch.full((batch, heads, max(rows, keys), columns), math.nan, device="cuda") for _ in range(8)]
        del poison
        out, lse = flashmoe.attention(*tensors, causal=causal, return_lse=True)
        assert "_forward_sm90" in _extension.last_kernel()
        assert "_d192_v128" in _extension.last_kernel()
        saved = (grad_out, None, *tensors, out, lse, columns**-0.5, causal)
        found = torch.ops.flashmoe.flash_attention_backward(*saved)
        assert "_backward_dkv_sm90" in _extension.last_kernel()
        assert "_d192_v128" in _extension.last_kernel()
        results = []
        for kind in (torch.float64, dtype):
            own = make_leaves(*tensors, dtype=kind)
            plain = attend(*own, ScoreOptions(causal))[0]
            results.append((plain, *torch.autograd.grad(plain, own, grad_out.to(kind))))
        for name, ours, exact, half in zip(("out", "dq", "dk", "dv"), (out, *found), *results, strict=True):
            error, allowed = ((tensor.double() - exact).abs().max().item() for tensor in (ours, half))
            rounding = torch.finfo(dtype).eps * exact.abs().max().item()
            assert error <= 2 * (allowed + rounding), f"{name} of {SHAPES[seed]}: {error:.2e}, torch {allowed:.2e}"
        for _ in range(20):
            again = torch.ops.flashmoe.flash_attention_backward(*saved)
            assert all(torch.equal(one, other) for one, other in zip(again, found, strict=True))
            assert torch.equal(flashmoe.attention(*tensors, causal=causal), out)


@pytest.mark.parametrize("band", [Band(window=(40, 3)), Band(causal=True, softcap=5.0)], ids=["window", "softcap"])
def test_what_has_no_narrow_kernel_runs_in_a_wider_one(band: Band, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    check_ragged(Ragged((70, 2, 33), (70, 150, 129), 6, 2, 192, 128), band, device, dtype, with_sinks=True)
    if device == "cuda" and torch.cuda.get_device_capability() == (9, 0) and not os.environ.get("FLASHMOE_KERNEL"):
        assert ("_v128" in _extension.last_kernel()) == (band.softcap == 0)
