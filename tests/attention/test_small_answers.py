"""Answers that on a CPU nothing depends on, because it has no kernels for 8-bit floats."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from flashmoe.attn import fp8

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch says about torch itself


def test_what_is_differentiated() -> None:
    plain, leaf = torch.zeros(2), torch.zeros(2, requires_grad=True)
    assert not fp8._is_differentiated(plain, None, 0.5)
    assert fp8._is_differentiated(plain, leaf)
    with torch.no_grad():
        assert not fp8._is_differentiated(plain, leaf)
        with forward_ad.dual_level():
            assert fp8._is_differentiated(plain, forward_ad.make_dual(plain, plain))
    seen: list[bool] = []
    torch.func.vmap(lambda x: seen.append(fp8._is_differentiated(x)) or x)(plain)
    assert seen == [True]


@pytest.mark.parametrize(
    ("family", "capability", "has_kernel"),
    [("", (9, 0), True), ("sm90", (9, 0), True), ("sm80", (9, 0), False), ("", (8, 9), False), ("", (10, 0), False)],
)
def test_which_gpu_has_kernels_for_8_bit_floats(
    monkeypatch: pytest.MonkeyPatch, family: str, capability: tuple[int, int], has_kernel: bool
) -> None:
    monkeypatch.setenv("FLASHMOE_KERNEL", family)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert fp8._has_kernel(torch.device("cuda")) is has_kernel
    assert not fp8._has_kernel(torch.device("cpu"))
    assert fp8._has_kernel(torch.device("meta"))
