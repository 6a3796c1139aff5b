"""The build suite, with a builder that takes no time."""

from pathlib import Path

import pytest

from flashmoe.__main__ import main
from flashmoe.errors import ArgumentError, ExitCode
from flashmoe_build import build_cost
from flashmoe_build.build_cost import BuildCase
from flashmoe_tools.report import Verdict, read_report

BUILDER = """
import argparse, hashlib, os, sys
from pathlib import Path
sys.path.insert(0, {package!r})
from flashmoe_tools.report import Check, Report, Verdict, write_report
parser = argparse.ArgumentParser()
parser.add_argument("--library-only", action="store_true")
parser.add_argument("--out", type=Path)
parser.add_argument("--archs")
parser.add_argument("--dist", type=Path)
arguments = parser.parse_args()
if arguments.archs == "broken":
    sys.exit("BuildError: no such target")
cache = Path(os.environ["FLASHMOE_CACHE_DIR"])
cache.mkdir(parents=True, exist_ok=True)
key = cache / hashlib.sha256(Path("csrc/kernel.cuh").read_bytes()).hexdigest()
cached = int(key.exists())
key.touch()
data = {{"units": [{{}}], "cached_units": cached, "ptx": 1, "cached_ptx": cached, "jobs": 1, "peak_bytes_per_job": 1000}}
if not arguments.library_only:
    arguments.dist.mkdir(exist_ok=True)
    (arguments.dist / "made.whl").write_bytes(b"x" * 1234567)
write_report(arguments.out / "reports" / "build.json", Report("build", (Check("built", Verdict.PASS),), data))
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = str(build_cost.ROOT)
    (tmp_path / "flashmoe_build").mkdir()
    (tmp_path / "flashmoe_build" / "__main__.py").write_text(BUILDER.format(package=package))
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "kernel.cuh").write_text("int a;\n")
    monkeypatch.setattr(build_cost, "ROOT", tmp_path)
    return tmp_path


def test_a_cold_build_and_one_after_a_touch(checkout: Path) -> None:
    cases = [BuildCase("all"), BuildCase("75"), BuildCase("all", "csrc/kernel.cuh")]
    report = build_cost.measure_builds(cases, ("bench",))
    assert [row["compiled"] for row in report.data["builds"]] == [1, 0, 1]
    assert report.verdict is Verdict.PASS
    assert [row.get("wheel_bytes") for row in report.data["builds"]] == [1234567, 1234567, None]
    assert "wheel 1.2 MB" in report.checks[0].found
    assert (checkout / "csrc" / "kernel.cuh").read_text() == "int a;\n"  # the checkout itself is unchanged


def test_a_failing_build_fails_with_its_words(checkout: Path) -> None:
    report = build_cost.measure_builds([BuildCase("broken")], ("bench",))
    assert report.verdict is Verdict.FAIL
    assert "no such target" in report.checks[0].found


def test_a_missing_file_to_touch_is_named(checkout: Path) -> None:
    with pytest.raises(ArgumentError, match=r"csrc/gone\.cuh"):
        build_cost.measure_builds([BuildCase("all", "csrc/gone.cuh")], ())


def test_a_replacement_is_made_once(checkout: Path) -> None:
    edits = [BuildCase("all", "csrc/kernel.cuh", change) for change in (("int a;", "int b;"), ("b;", "c;"))]
    report = build_cost.measure_builds([BuildCase("all"), *edits], ("bench",))
    assert [(row["key"], row["new_ptx"]) for row in report.data["builds"]] == [
        ("build-all-cold", 1),
        ("build-all-edit-kernel", 1),
        ("build-all-edit-kernel", 1),
    ]


@pytest.mark.parametrize(("old", "times"), [("gone", 0), ("int ", 2)])
def test_a_replacement_that_is_not_unique_is_refused(checkout: Path, old: str, times: int) -> None:
    (checkout / "csrc" / "kernel.cuh").write_text("int a; int b;\n")
    with pytest.raises(ArgumentError, match=f"occurs {times} times in csrc/kernel.cuh"):
        build_cost.measure_builds([BuildCase("all", "csrc/kernel.cuh", (old, "new"))], ())


def test_our_own_suite_edits_what_exists() -> None:
    root = Path(__file__).resolve().parents[2]
    cases = build_cost.CASES
    assert [bool(case.touch) + bool(case.replace) for case in cases] == [0, 1, 2]
    for case in cases:
        text = (root / case.touch).read_text() if case.touch else ""
        assert case.replace is None or text.count(case.replace[0]) == 1


def test_the_command_writes_its_report(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_cost.main(["--suite", "build-cost", "--json", str(checkout / "out.json")]) == ExitCode.USAGE
    assert f"touches {build_cost.INCLUDED}, which does not exist" in capsys.readouterr().err
    (checkout / build_cost.INCLUDED).parent.mkdir(parents=True)
    (checkout / build_cost.INCLUDED).write_text("walk.start();")
    assert build_cost.main(["--suite", "build-cost", "--json", str(checkout / "out.json")]) == ExitCode.OK
    assert len(read_report(checkout / "out.json").data["builds"]) == 3


def test_a_wheel_has_no_builder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "build-cost", "--device", "cpu"]) == ExitCode.USAGE
    assert "the build-cost suite needs a checkout" in capsys.readouterr().err
