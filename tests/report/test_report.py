"""Writing a report: a regular file is replaced by a new one; to anything else the bytes are written."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from flashmoe.errors import ExitCode, ReportError
from flashmoe_tools.report import Check, Report, Verdict, overall, write_json, write_report, write_summary

REPORT = Report("test", (Check("a", Verdict.PASS),))


def test_a_regular_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.json"
    write_json(path, {"a": 1})
    before = path.stat().st_ino
    write_report(path, REPORT)
    assert json.loads(path.read_text())["verdict"] == "PASS"
    assert path.stat().st_ino != before
    assert list(path.parent.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """To a file, to a missing file, and through two links: /dev/stdout is such a chain."""
    target, link, second = tmp_path / "target.json", tmp_path / "link", tmp_path / "second"
    link.symlink_to(target)
    second.symlink_to(link)
    for path in (link, second):
        write_report(path, REPORT)
        assert path.is_symlink()
        assert json.loads(target.read_text())["kind"] == "test"
        target.unlink()


def test_a_fifo_stays_a_fifo(tmp_path: Path) -> None:
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()))
    reader.start()
    write_summary(fifo, {"a": 1})
    reader.join(20)
    assert json.loads(read[0]) == {"a": 1}
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    """Uses a separate device node if that is allowed, so that a failure breaks nothing."""
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_text("")
    except OSError:
        device = Path(os.devnull)
    write_report(device, REPORT)
    assert stat.S_ISCHR(device.stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/full", "."])
def test_what_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReportError, match="cannot write"):
        write_report(Path(name), REPORT)


def test_what_is_not_proved_is_no_pass() -> None:
    passed, warned = Check("a", Verdict.PASS), Check("b", Verdict.WARN)
    unproved, failed = Check("c", Verdict.UNPROVED), Check("d", Verdict.FAIL)
    assert overall((passed, warned, unproved)) is Verdict.UNPROVED
    assert overall((unproved, failed)) is Verdict.FAIL
    assert Report("x", (passed, unproved)).exit_code is ExitCode.NOT_PROVED
