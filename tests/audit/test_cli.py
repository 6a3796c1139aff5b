"""The command: exit codes, log output, terminal output, JSON."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from audit_builders import Workshop, audit, package_files

import flashmoe
from flashmoe.errors import ExitCode
from flashmoe_tools.audit.render import kernel_table, plain, show
from flashmoe_tools.report import read_report
from flashmoe_tools.tables import Tables


def environment() -> dict[str, str]:
    """The environment in which flashmoe is the one under test; used in a folder that contains no other one."""
    return {**os.environ, "PYTHONPATH": str(Path(flashmoe.__file__).parent.parent)}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "flashmoe", "audit", *arguments]
    return subprocess.run(words, cwd="/", env=environment(), capture_output=True, text=True, timeout=120, check=False)


def test_pass_is_zero_and_writes_the_report(workshop: Workshop, tmp_path: Path) -> None:
    path = workshop.extension({"bind.cpp": 'extern "C" int PyInit__C() { return 1; }'})
    done = command(str(path), "--json", str(tmp_path / "audit.json"))
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    report = read_report(tmp_path / "audit.json")
    assert (report.kind, report.verdict.value) == ("audit", "PASS")
    assert report.data["subjects"][0]["sha256"]
    assert str(tmp_path) not in json.dumps(report.to_json()), "no folder of this machine in a report"


def test_failure_is_one_and_says_everything(workshop: Workshop) -> None:
    done = command(
        str(workshop.extension({"bind.cpp": 'extern "C" void launch(); extern "C" void PyInit__C() { launch(); }'}))
    )
    assert done.returncode == ExitCode.FAILED
    for word in (
        "FAIL  undefined symbol: launch",
        "found    launch is undefined",
        "expected ",
        "why      ",
        "Cause: ",
        "next     ",
    ):
        assert word in done.stdout


@pytest.mark.parametrize("content", ["folder", "missing", "wheel"])
def test_nothing_checked_is_three(workshop: Workshop, tmp_path: Path, content: str) -> None:
    path = {"folder": tmp_path, "missing": tmp_path / "_C.so"}.get(content) or workshop.wheel(
        {"a/__init__.py": ""}, name="a-1-py3-none-any.whl"
    )
    assert command(str(path)).returncode == ExitCode.NOTHING_CHECKED


def test_unusable_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "_C.so").write_text("text")
    done = command(str(tmp_path / "_C.so"))
    assert (done.returncode, "FAIL  input: not an ELF file" in done.stdout) == (ExitCode.FAILED, True)


def test_no_path_is_a_usage_error() -> None:
    assert command().returncode == ExitCode.USAGE


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("",), "an empty path"),
        (("{sound}", "--targets", "sm_75,sm_99"), "--targets 'sm_75,sm_99': no target 'sm_99'"),
        (("{sound}", "--torch-version", "newest"), "--torch-version 'newest' is not a version; write it as 2.10.0"),
    ],
)
def test_arguments_that_mean_nothing_are_usage_errors(sound: Path, words: tuple[str, ...], says: str) -> None:
    done = command(*(word.format(sound=sound) for word in words))
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert says in done.stderr


def test_an_unknown_option_shows_the_usage_of_its_command(sound: Path) -> None:
    done = command(str(sound), "--sorce", "x")
    assert done.returncode == ExitCode.USAGE
    assert "--source DIR" in done.stderr
    assert "unrecognized arguments: --sorce x" in done.stderr


def test_nothing_of_a_hostile_file_runs(workshop: Workshop) -> None:
    """A constructor in the file would print if it were loaded; `--no-load` of older versions is still accepted."""
    loud = '#include <stdio.h>\n__attribute__((constructor)) static void start() { puts("ran"); fflush(stdout); }\n'
    path = workshop.extension({"bind.cpp": loud + 'extern "C" int PyInit__C() { return 1; }'})
    words = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", str(path)]
    assert b"ran" in subprocess.run(words, capture_output=True, check=False).stdout, "it would"
    for more in ((), ("--no-load",)):
        done = command(str(path), *more)
        assert done.returncode == ExitCode.OK
        assert "ran" not in done.stdout.split()


def test_an_ascii_terminal_gets_every_line(workshop: Workshop, tmp_path: Path) -> None:
    path = tmp_path / "größe.so"
    path.write_text("text")
    words = [sys.executable, "-m", "flashmoe", "audit", str(path)]
    environ = {**environment(), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, cwd="/", env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (ExitCode.FAILED, False)
    assert r"gr\xf6\xdfe.so" in done.stdout


def test_a_source_folder_that_is_not_there_is_a_failure(sound: Path, tmp_path: Path) -> None:
    done = command(str(sound), "--source", str(tmp_path / "gone"))
    assert done.returncode == ExitCode.NOTHING_CHECKED
    assert "gone is not a folder" in done.stdout


def message(errors: str) -> str:
    """The lines without those that an audit of more than five seconds prints on a busy machine."""
    return "\n".join(line for line in errors.splitlines() if not line.startswith("audit of "))


@pytest.mark.parametrize("place", ["a file/report.json", "."])
def test_a_report_that_cannot_be_written_is_said_in_one_line(sound: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").touch()
    done = command(str(sound), "--json", str(tmp_path / place))
    assert done.returncode == ExitCode.FAILED
    assert message(done.stderr).startswith("ReportError: cannot write ")
    assert "Traceback" not in done.stderr


def test_output_onto_a_full_disk_is_said_in_one_line() -> None:
    words = [sys.executable, "-m", "flashmoe", "smem", "--head-dim", "64"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, cwd="/", env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == ExitCode.FAILED
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "words", "says"),
    [
        ("packaging", ("audit", "{wheel}"), "flashmoe audit needs packaging, which is not installed; pip install 'flashmoe-kernels[tools]'"),
        ("torch", ("bench", "--quick"), "flashmoe bench needs torch, which is not installed; pip install 'torch>=2.10'"),
        ("scipy", ("bench", "--compare", "a", "b"), "flashmoe bench needs scipy, which is not installed; pip install 'flashmoe-kernels[bench]'"),
    ],
)  # fmt: skip
def test_a_plain_install_says_what_a_command_needs_beside_it(
    workshop: Workshop, sound: Path, module: str, words: tuple[str, ...], says: str
) -> None:
    filled = [word.format(wheel=workshop.wheel(package_files(sound))) for word in words]
    code = f"import sys; sys.modules[{module!r}] = None; from flashmoe.__main__ import main; sys.exit(main({filled!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", env=environment(), capture_output=True, text=True)
    assert (done.returncode, message(done.stderr)) == (ExitCode.FAILED, says)


def test_torch_is_not_imported(sound: Path) -> None:
    script = f"import sys; from pathlib import Path; from flashmoe_tools.audit import audit; audit(Path({str(sound)!r})); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd="/", env=environment(), check=True, timeout=120)


def test_log_has_the_launchability_table(sound: Path, tables: Tables) -> None:
    report = audit(sound, tables=tables)
    lines = list(plain(report))
    assert lines[-1].startswith("audit of libflashmoe.so: PASS (")
    header, *rows = kernel_table(report.data)
    assert header == ("unit", "threads", "static", "dynamic", "compute_80", "sm_80", "sm_90a")
    assert [row[0] for row in rows] == ["attention_forward_sm80_bf16_d64", "attention_forward_sm80_f16_d64"]
    for row in rows:
        assert row[1:4] == ("128", "0", "24576")
        assert re.fullmatch(r"-: \d+ \d+ \d+ \d+ \d+ \d+", row[4]), "PTX: registers unknown, six GPUs"
        assert re.fullmatch(r"\d+: \d+ \d+ \d+", row[5]), "sm_80, sm_86 and sm_89"
        assert re.fullmatch(r"\d+: \d+", row[6])
    assert all(any(cell in line for line in lines) for row in rows for cell in row)


def test_table_shows_where_nothing_fits() -> None:
    """The worst kernel of a unit counts, and a kernel that cannot be launched has 0 blocks."""
    common = {
        "unit": "k",
        "target": "sm_80",
        "threads": 128,
        "smem_static": 0,
        "smem_dynamic": 122880,
        "local_memory": 0,
    }
    rows = [
        {**common, "kernel": "flashmoe_k_full", "gpu": "sm80", "registers": 100, "blocks_per_sm": 2, "problems": []},
        {**common, "kernel": "flashmoe_k_causal", "gpu": "sm80", "registers": 168, "blocks_per_sm": 1, "problems": []},
        {**common, "kernel": "flashmoe_k_full", "gpu": "sm86", "registers": 100, "blocks_per_sm": 3, "problems": ["x"]},
    ]
    assert kernel_table({"subjects": [{"launchability": rows}]})[1] == ("k", "128", "0", "122880", "168: 1 0")


def test_a_terminal_shows_verdicts_in_colour(sound: Path, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    report, coloured, plain_one = audit(sound, tables=tables), Terminal(), Terminal()
    show(report, coloured)
    assert "\n\x1b[32mPASS\x1b[0m  launchability" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    show(report, plain_one)
    assert plain_one.getvalue() == "\n".join(plain(report)) + "\n"
