"""`nox -s reproduce -- --independent`: what may differ with another g++, and what must not."""

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from flashmoe.errors import BuildError, ExitCode
from flashmoe_build.release import independent, reproduce
from flashmoe_build.release.independent import check_rebuilt
from flashmoe_build.release.version import Commit
from flashmoe_tools.report import Verdict
from flashmoe_tools.verify.content import read_wheel

WheelMaker = Callable[..., Path]
OTHER = {"cxx": "g++ 14.2.0"}
WHEEL, KERNEL = "rebuilt wheel", "rebuilt device binary attention_bf16.sm_80"
PASS, SKIP, FAIL = Verdict.PASS, Verdict.SKIP, Verdict.FAIL


def judged(first: Path, second: Path, folder: Path) -> dict[str, Verdict]:
    checks = check_rebuilt("other", read_wheel(first, folder / "one"), read_wheel(second, folder / "two"))
    return {check.name.removeprefix("other: "): check.verdict for check in checks}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, {}),
        ({"content": b"\0", "compilers": OTHER}, {WHEEL: SKIP}),
        ({"content": b"\0"}, {WHEEL: FAIL}),  # the same compiler
        ({"content": b"\0", "compilers": OTHER, "files": {"flashmoe/__init__.py": "x"}}, {WHEEL: FAIL}),
        ({"content": b"\0", "compilers": OTHER, "targets": []}, {WHEEL: SKIP, "provenance": FAIL}),
        ({"content": b"kernel", "compilers": OTHER}, {WHEEL: SKIP, KERNEL: FAIL}),
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
    found = judged(given, make_wheel(**stated), tmp_path)
    assert {name: verdict for name, verdict in found.items() if verdict is not PASS} == wrong
    assert set(found) >= {WHEEL, "provenance"}


def test_a_wheel_of_head_is_built_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, built = "0123456789ab" * 3 + "cdef", list[Sequence[str]]()
    name = f"flashmoe_kernels-0.1.0.dev0+g{head[:12]}-py3-none-manylinux_2_28_{platform.machine()}.whl"
    (tmp_path / name.replace(head[:12], "0" * 12)).touch()  # of another commit

    def build(command: Sequence[str], what: str, **_: object) -> None:
        built.append(command)
        (tmp_path / name).touch()

    monkeypatch.setattr(independent, "run", build)
    monkeypatch.setattr(independent, "project_version", lambda archs: f"0.1.0.dev0+g{head[:12]}")
    monkeypatch.setattr(independent, "find_commit", lambda _: Commit(head, dirty=True, source_date_epoch=0))
    with pytest.raises(BuildError, match="commit or stash"):
        independent.wheel_of_head(tmp_path, "none", 1)
    monkeypatch.setattr(independent, "find_commit", lambda _: Commit(head, dirty=False, source_date_epoch=0))
    assert [independent.wheel_of_head(tmp_path, "none", 1).name for _ in "ab"] == [name, name]
    assert [command[3:5] for command in built] == [["--archs", "none"]]  # once


@pytest.mark.parametrize("words", ["--wheel x.whl", "--bases x", "--independent --wheel x.whl --archs none"])
def test_an_option_without_effect_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(words.split())
    assert stopped.value.code == ExitCode.USAGE
    assert "--wheel" in capsys.readouterr().err
