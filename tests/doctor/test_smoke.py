"""The smoke test must fail on a wrong answer, and on a right one that is not ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashmoe import smoke
from flashmoe.tools.report import Verdict

CASE = smoke.Case("cpu", "float16", 65, causal=True)
RIGHT = smoke.Outcome(error=1e-4, bound=1e-3, lse_error=1e-6, finite=True, kernel="cpu:avx2")


def test_right_and_ours() -> None:
    assert smoke.judge(CASE, RIGHT).verdict is Verdict.PASS
    on_gpu = replace(RIGHT, kernel="flashmoe_attention_forward_sm80_f16_d64_causal")
    assert smoke.judge(replace(CASE, device="cuda"), on_gpu).verdict is Verdict.PASS


@pytest.mark.parametrize(
    "change",
    [
        {"error": 4.72},
        {"error": float("nan")},
        {"lse_error": 1e-3},
        {"finite": False},
        {"kernel": ""},
        {"kernel": "flashmoe_attention_forward_sm80_f16_d64_causal"},
    ],
)
def test_wrong_or_not_ours(change: dict[str, float]) -> None:
    check = smoke.judge(CASE, replace(RIGHT, **change))
    assert check.verdict is Verdict.FAIL
    assert check.next_step


def test_the_reference_agrees_with_torch() -> None:
    q, k, v = (torch.randn(1, 2, 7, 16, dtype=torch.float64) for _ in range(3))
    out, lse = smoke.plain(q, k, v, causal=True)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert lse.shape == (1, 2, 7)


def test_a_planted_index_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows past the first tile of 64 read the wrong query."""
    import flashmoe
    from flashmoe import _extension

    def attention(q, k, v, *, causal, return_lse):  # type: ignore[no-untyped-def]
        wrong = q[:, :, torch.arange(q.shape[2]) % 64]
        return smoke.plain(wrong, k, v, causal=causal)

    monkeypatch.setattr(flashmoe, "attention", attention, raising=False)
    monkeypatch.setattr(_extension, "last_kernel", lambda: "cpu:avx2")
    assert smoke.check_case(smoke.Case("cpu", "float32", 64, causal=False)).verdict is Verdict.PASS
    assert smoke.check_case(smoke.Case("cpu", "float32", 65, causal=False)).verdict is Verdict.FAIL


def test_an_error_is_a_failure_not_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashmoe

    def attention(*arguments: object, **options: object) -> None:
        raise RuntimeError("the launch failed")

    monkeypatch.setattr(flashmoe, "attention", attention, raising=False)
    check = smoke.check_case(CASE)
    assert check.verdict is Verdict.FAIL
    assert "the launch failed" in check.found


def test_one_line_a_group_and_every_failure() -> None:
    good = smoke.judge(CASE, RIGHT)
    bad = smoke.judge(replace(CASE, length=64), replace(RIGHT, error=9.0))
    lines = smoke.summarise([good, good, bad])
    assert lines[0].startswith("PASS  cpu float16: 2 of 3")
    assert lines[1].startswith("FAIL  cpu float16 S=64")


def test_the_program_runs_the_installed_extension(capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main(["--quick"]) == 0
    assert "smoke PASS" in capsys.readouterr().out
