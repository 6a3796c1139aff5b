"""The smoke test must fail on a wrong result, and on a right one that did not come from flashmoe."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from flashmoe_tools import smoke
from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention.reference import ScoreOptions, attend
from flashmoe_tools.report import Verdict

CASE = smoke.Case("cpu", "float16", 65, causal=True)
RIGHT = Verification(passed=True, max_error=1e-4, tolerance=1e-3, lse_error=1e-6, coverage=1.0)
CPU_KERNEL = "cpu:avx2"
GPU_KERNEL = "flashmoe_attention_forward_sm80_f16_d64_causal"
FEW_ROWS_KERNEL = "flashmoe_attention_decode_sm80_f16_d64"


def test_right_and_ours() -> None:
    assert smoke.judge(CASE, RIGHT, CPU_KERNEL).verdict is Verdict.PASS
    for kernel in (GPU_KERNEL, FEW_ROWS_KERNEL):
        assert smoke.judge(replace(CASE, device="cuda"), RIGHT, kernel).verdict is Verdict.PASS


def test_another_operations_kernel_is_none_of_attentions() -> None:
    kernel = "flashmoe_grouped_gemm_sm80_f16"
    assert smoke.judge(replace(CASE, device="cuda"), RIGHT, kernel).verdict is Verdict.FAIL


@pytest.mark.parametrize(("passed", "kernel"), [(False, CPU_KERNEL), (True, ""), (True, GPU_KERNEL)])
def test_wrong_or_not_ours(passed: bool, kernel: str) -> None:
    check = smoke.judge(CASE, replace(RIGHT, passed=passed), kernel)
    assert check.verdict is Verdict.FAIL
    assert check.next_step


@pytest.mark.parametrize(
    ("spoil_out", "spoil_lse"),
    [
        (lambda out: out + 4.72, lambda lse: lse),
        (lambda out: out * float("nan"), lambda lse: lse),
        (lambda out: out, lambda lse: lse + 1e-3),
    ],
)
def test_the_rule_refuses_a_wrong_result(
    spoil_out: Callable[[torch.Tensor], torch.Tensor], spoil_lse: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    problem = CASE.problem
    inputs = problem.make_inputs("cpu", seed=0)
    reference = problem.make_reference(inputs)
    out, lse = attend(inputs.q.double(), inputs.k.double(), inputs.v.double(), ScoreOptions(causal=True))
    assert reference.judge(out.half(), lse).passed
    assert not reference.judge(spoil_out(out.half()), spoil_lse(lse)).passed


@pytest.mark.parametrize("rows", [4, 7, 9])
def test_the_reference_agrees_with_torch(rows: int) -> None:
    q, k, v = (torch.randn(1, 2, length, 16, dtype=torch.float64) for length in (rows, 7, 7))
    out, lse = attend(q, k, v, ScoreOptions(causal=True, scale=0.25))
    mask = torch.ones(rows, 7, dtype=torch.bool).tril(7 - rows)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).nan_to_num(0.0)
    torch.testing.assert_close(out, expected)
    assert lse.shape == (1, 2, rows)
    assert torch.equal(lse == float("-inf"), ~mask.any(-1).expand(1, 2, rows))


def test_a_planted_index_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows past the first tile of 64 read the wrong query."""
    import flashmoe
    from flashmoe import _extension

    def attention(q, k, v, *, causal, return_lse):  # type: ignore[no-untyped-def]
        wrong = q[:, :, torch.arange(q.shape[2]) % 64]
        return attend(wrong, k, v, ScoreOptions(causal))

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
    good = smoke.judge(CASE, RIGHT, CPU_KERNEL)
    bad = smoke.judge(replace(CASE, length=64), replace(RIGHT, passed=False), CPU_KERNEL)
    lines = smoke.summarise([good, good, bad])
    assert lines[0].startswith("PASS  cpu float16: 2 of 3")
    assert lines[1].startswith("FAIL  cpu float16 S=64")


def test_the_program_runs_the_installed_extension(capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main(["--quick"]) == 0
    assert "smoke PASS" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_whole_program_passes_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    status = smoke.main([])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "cuda float16: 16 of 16" in printed
