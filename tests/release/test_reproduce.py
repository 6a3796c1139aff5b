"""`nox -s reproduce`: the environments really differ, and a build that depends on its environment is detected."""

import functools
from pathlib import Path

import pytest
from release_builders import git

from flashmoe.errors import BuildError, ExitCode
from flashmoe_build.release import reproduce as program
from flashmoe_build.release.reproduce import BuildEnvironment, Machine, compare, plan, reproduce
from flashmoe_tools.report import Check, Report, Verdict, read_report

# A build with the sessions' interface that writes into its wheel everything that the environments vary.
LEAKY = """
import json, locale, os, pathlib, time, zipfile
facts = {
    "path": os.getcwd(),
    "umask": oct(os.stat("made").st_mode) if not pathlib.Path("made").write_text("") else "",
    "locale": os.environ.get("LC_ALL"),
    "zone": time.strftime("%z"),
    "seed": os.environ["PYTHONHASHSEED"],
    "jobs": os.environ["MAX_JOBS"],
    "file time": str(int(os.stat("a.txt").st_mtime)),
    "cache": os.environ.get("FLASHMOE_CACHE_DIR", "none"),
    "day": str(int(time.time()) // 86400),
    "user": str(os.geteuid()),
}
pathlib.Path("dist").mkdir()
pathlib.Path("build").mkdir(exist_ok=True)
with zipfile.ZipFile("dist/x.whl", "w") as wheel:
    for name, value in facts.items():
        if name in KEPT:
            wheel.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), value)
    wheel.writestr(zipfile.ZipInfo("same", (1980, 1, 1, 0, 0, 0)), "same")
stated = [{"name": "kernel", "target": "sm_80", "sha256": facts.get("path") if "binary" in KEPT else "0"}]
pathlib.Path("build/provenance.json").write_text(json.dumps({"binaries": stated}))
"""
ALWAYS = ("path", "umask", "locale", "zone", "seed", "jobs", "file time", "cache")


def repository(folder: Path, kept: tuple[str, ...]) -> Path:
    (folder / "flashmoe_build").mkdir(parents=True)
    (folder / "flashmoe_build" / "__main__.py").write_text(f"KEPT = {kept!r}\n{LEAKY}")
    (folder / "a.txt").write_text("a")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        git(folder, *command)
    return folder


def run(tmp_path: Path, *kept: str) -> Report:
    (tmp_path / "scratch").mkdir()
    return reproduce("80", 2, tmp_path / "scratch", root=repository(tmp_path / "root", kept))


def different(report: Report) -> set[str]:
    return {check.name.split(": ", 1)[1] for check in report.checks if check.verdict is Verdict.FAIL}


def test_a_build_that_takes_nothing_from_its_world_passes(tmp_path: Path) -> None:
    report = run(tmp_path)
    assert report.verdict is Verdict.PASS, report.checks
    same = [check for check in report.checks if check.name.startswith("same bytes")]
    assert len(same) == 2 * 3  # two builds compared with the first; the wheel, its one member, its one device binary


def test_everything_that_is_varied_reaches_the_build(tmp_path: Path) -> None:
    report = run(tmp_path, *ALWAYS)
    assert report.verdict is Verdict.FAIL
    assert different(report) == {*ALWAYS, "x.whl"}


@pytest.mark.parametrize("leak", ["path", "zone"])
def test_one_planted_difference_is_named(tmp_path: Path, leak: str) -> None:
    assert different(run(tmp_path, leak)) == {leak, "x.whl"}


def test_a_device_binary_that_differs_alone_is_found(tmp_path: Path) -> None:
    assert different(run(tmp_path, "binary")) == {"kernel.sm_80"}


@pytest.mark.skipif(not program.look_around().faketime, reason="faketime is not installed")
def test_the_clock_is_varied(tmp_path: Path) -> None:
    assert "day" in different(run(tmp_path, "day"))


def test_what_a_machine_lacks_is_said(tmp_path: Path) -> None:
    environments, checks = plan(4, Machine("", "", "not root", ""), tmp_path, tmp_path / "s")
    assert {check.name: check.found for check in checks if check.verdict is Verdict.SKIP} == {
        "varied: clock": "faketime is not installed",
        "varied: user": "not root",
        "varied: file system": "no memory file system with room",
    }
    assert len({one.folder for one in environments}) == len({one.umask for one in environments}) == 3
    assert environments[2].variables["FLASHMOE_CACHE_DIR"] == str(environments[0].folder / "build" / "cache")


def test_a_faked_clock_and_another_user_wrap_the_build(tmp_path: Path) -> None:
    environments, _ = plan(1, Machine("/usr/bin/faketime", "nobody", "", "/dev/shm"), tmp_path, tmp_path / "s")
    assert environments[0].prefix == ()
    assert environments[1].prefix[0] == "setpriv"
    assert environments[1].prefix[-3:] == ("/usr/bin/faketime", "-f", "+400d")
    assert environments[0].variables["MAX_JOBS"] != environments[1].variables["MAX_JOBS"]


def test_a_file_on_one_side_only_is_a_difference() -> None:
    checks = compare({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, "plain and strange")
    assert [check.verdict for check in checks] == [Verdict.PASS, Verdict.FAIL, Verdict.FAIL]
    assert checks[1] == Check(
        "same bytes, plain and strange: b", Verdict.FAIL, "not there", "2", next_step=checks[1].next_step
    )


def test_an_interruption_leaves_what_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, build_in, environments = repository(tmp_path / "root", ("umask",)), program.build_in, []

    def build(environment: BuildEnvironment, archs: str) -> Path:
        environments.append(environment.name)
        if len(environments) == 3:
            raise KeyboardInterrupt
        return build_in(environment, archs)

    monkeypatch.setattr(program, "build_in", build)
    monkeypatch.setattr(program, "reproduce", functools.partial(reproduce, root=root))
    monkeypatch.setattr("flashmoe_build.program.REPORTS", root / "build" / "reports")
    assert program.main(["--archs", "80"]) == ExitCode.INTERRUPTED
    printed = capsys.readouterr().out
    assert "FAIL interrupted 2 of 3 builds were done" in printed
    assert "FAIL same bytes, plain and strange: umask" in printed
    assert "reproduce FAIL: 2 comparisons" in printed
    assert read_report(root / "build" / "reports" / "reproduce.json").data["seconds"].keys() == {"plain", "strange"}


def test_a_build_that_fails_is_an_error_with_its_output(tmp_path: Path) -> None:
    root = repository(tmp_path / "root", ())
    (root / "flashmoe_build" / "__main__.py").write_text("raise SystemExit('no compiler')\n")
    git(root, "commit", "-q", "-am", "two")
    (tmp_path / "scratch").mkdir()
    with pytest.raises(BuildError, match="no compiler"):
        reproduce("80", 2, tmp_path / "scratch", root=root)
    assert not list(tmp_path.rglob("flashmoe-reproduce-*"))
