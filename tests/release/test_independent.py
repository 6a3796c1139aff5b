"""`nox -s reproduce -- --independent`: what another g++ may change, and what nothing may."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flashmoe.tools.report import Verdict
from flashmoe.tools.verify.content import read_wheel
from flashmoe_build.release.independent import judge

WheelMaker = Callable[..., Path]
OTHER = {"cxx": "g++ 14.2.0", **dict.fromkeys(("nvrtc_sha256", "ptxas_sha256"), "ab" * 32)}
PASS, SKIP, FAIL = Verdict.PASS, Verdict.SKIP, Verdict.FAIL


def judged(first: Path, second: Path, folder: Path) -> dict[str, Verdict]:
    checks = judge("other", read_wheel(first, folder / "one"), read_wheel(second, folder / "two"))
    return {check.name.removeprefix("other: "): check.verdict for check in checks}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, {}),
        ({"content": b"\0", "compilers": OTHER}, {"host part": SKIP}),
        ({"content": b"\0"}, {"host part": FAIL}),  # the same compiler
        ({"content": b"\0", "compilers": OTHER, "files": {"flashmoe/__init__.py": "x"}}, {"host part": SKIP, "files": FAIL}),
        ({"content": b"\0", "compilers": OTHER, "targets": []}, {"host part": SKIP, "provenance": FAIL}),
        ({"content": b"kernel", "compilers": OTHER}, {"host part": SKIP, "device binaries": FAIL}),
    ],
    ids=["same", "other compiler", "library", "file", "provenance", "kernel"],
)  # fmt: skip
def test_judge(
    make_wheel: WheelMaker, library: bytes, tmp_path: Path, changes: dict[str, object], wrong: dict[str, Verdict]
) -> None:
    change = changes.get("content")
    content = (
        library.replace(b"\x7fELF bf16 ", b"\x7fELF bf17 ", 1) if change == b"kernel" else library + (change or b"")
    )  # type: ignore[operator]
    given = make_wheel(compilers={**OTHER, "cxx": "g++ 12.2.0"})
    stated = {"compilers": {**OTHER, "cxx": "g++ 12.2.0"}, **changes, "content": content}
    right = dict.fromkeys(("device binaries", "files", "provenance", "host part"), PASS)
    assert judged(given, make_wheel(**stated), tmp_path) == {**right, **wrong}
