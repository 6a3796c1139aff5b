"""The comparison of engines that serve the same model; the engines themselves need vLLM (flashmoe_build/engines/serve.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashmoe_build.engines import serve


def test_tokens_count_up_to_the_first_other_one() -> None:
    theirs = [[(1, -0.5), (2, -1.0), (3, -0.1)], [(4, -2.0)]]
    ours = [[(1, -0.4), (9, -3.0), (3, -0.1)], [(4, -2.05)]]
    equal, total, largest = serve.compare(theirs, ours)
    assert (equal, total) == (2, 4)
    assert largest == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("model", "dtype", "token", "value", "calls", "verdict"),
    [
        ("dense", "float32", 5, -1.0, (3, 0), 0),
        ("dense", "float32", 5, -1.1, (3, 0), 1),  # another probability
        ("dense", "float32", 6, -1.0, (3, 0), 1),  # another token
        ("dense", "bfloat16", 6, -1.0, (3, 0), 0),  # may be a tie
        ("dense", "float32", 5, -1.0, (0, 0), 1),  # flashmoe did not run
        ("moe", "float32", 5, -1.0, (3, 0), 1),
        ("moe", "float32", 5, -1.0, (3, 3), 0),
    ],
)
def test_a_run_passes_where_flashmoe_ran_and_gave_the_same(
    model: str,
    dtype: str,
    token: int,
    value: float,
    calls: tuple[int, int],
    verdict: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: list[str], **options: Any) -> None:
        is_ours = command[-2] == "CUSTOM"
        assert options["env"]["FLASHMOE_VLLM_EXPERTS"] == ("1" if is_ours else "0")
        found = [[(token, value) if is_ours else (5, -1.0)]]
        counts = dict(zip(("attention", "experts"), calls, strict=True))
        Path(command[-1]).write_text(json.dumps({"found": found, "calls": counts}))

    monkeypatch.setattr(serve, "save_model", lambda kind, folder: None)
    monkeypatch.setattr(serve.subprocess, "run", run)
    assert serve.main(["--model", model, "--dtype", dtype]) == verdict
