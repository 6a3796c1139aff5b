"""The last rung: what stops the loader is found, nothing of the file runs, and the sandbox holds."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from audit_builders import Workshop, audit, named, run
from faults import FAULTS, broken

from flashmoe_tools.audit import Options, loader, sandbox
from flashmoe_tools.report import Verdict

SOURCE = """
#include <cstdio>
int table[3] = {1, 2, 3};
int* pointers[3] = {table, table + 1, table + 2};
extern "C" int helper(int n) { return puts("x") + *pointers[n]; }
extern "C" int PyInit__C() { return helper(1); }
"""
# Says that it ran, from a constructor and from the resolver of an indirect function.
LOUD = """
#include <unistd.h>
static void say(const char* text) { if (write(1, text, 4) < 0) _exit(1); }
__attribute__((constructor)) static void start() { say("ran\\n"); }
extern "C" int one() { return 1; }
extern "C" void* resolve() { say("ran\\n"); return (void*)one; }
extern "C" int indirect() __attribute__((ifunc("resolve")));
extern "C" int PyInit__C() { return indirect(); }
"""
ESCAPES = """
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#define TRY(call) printf("%s %ld %d\\n", #call, (long)(call), errno)
int main(int, char** words) {
  TRY(socket(AF_INET, SOCK_STREAM, 0)); TRY(fork()); TRY(kill(getppid(), 0)); TRY(open(words[1], O_RDWR));
  TRY(open(words[1], O_WRONLY | O_CREAT | O_TRUNC, 0600)); TRY(unlink(words[1])); TRY(chmod(words[1], 0)); TRY(memfd_create("x", 0));
  TRY(ptrace(PTRACE_ATTACH, getppid(), 0, 0));
  int kept = open(words[1], O_RDONLY);
  return printf("%s\\n", kept < 0 ? "cannot read" : "can read") < 0;
}
"""


@pytest.fixture(scope="module")
def plain(workshop: Workshop) -> Path:
    return workshop.extension({"bind.cpp": SOURCE})


def test_a_sound_file_is_mapped(plain: Path) -> None:
    report = audit(plain, Options(load=True))
    check = next(c for c in report.checks if c.name == "the loader")
    assert (report.verdict, check.verdict) == (Verdict.PASS, Verdict.PASS), check
    assert "no code of it ran" in check.found


@pytest.mark.parametrize("fault", FAULTS)
def test_what_stops_the_loader_is_found(plain: Path, tmp_path: Path, fault: str) -> None:
    """The oracle is dlopen itself; it crashes on many of these."""
    path = broken(plain, tmp_path / "_C.so", fault)
    words = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", str(path)]
    assert subprocess.run(words, capture_output=True, check=False, timeout=60).returncode, "dlopen takes it: no fault"
    answer = loader.ask(path, (path.parent,))
    assert answer.refusal or "needed" in fault, answer  # a needed library of another name is found by the tables
    assert str(tmp_path) not in answer.refusal


def test_the_audit_says_what_the_loader_said(plain: Path, tmp_path: Path) -> None:
    path = broken(plain, tmp_path / "_C.so", "PLT relocation of an unknown type")
    assert audit(path).verdict is Verdict.PASS, "no table that the audit itself reads is damaged"
    assert named(audit(path, Options(load=True)), "the loader").found == "unexpected reloc type 0xfa"


def test_what_the_tables_miss_is_not_said_twice(workshop: Workshop) -> None:
    path = workshop.extension({"bind.cpp": 'extern "C" void launch(); extern "C" void PyInit__C() { launch(); }'})
    report = audit(path, Options(load=True))
    assert [c.name for c in report.checks if c.verdict is Verdict.FAIL] == ["undefined symbol: launch"]
    assert "misses launch, which the checks above" in report.checks[-1].found


def test_nothing_of_the_file_runs(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workshop.extension({"bind.cpp": LOUD})
    words = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", str(path)]
    assert b"ran" in subprocess.run(words, capture_output=True, check=False).stdout, "it would"
    said: list[str] = []
    understood = loader._understood

    def listen(status: int, text: str, file: Path) -> loader.Answer:
        said.append(text)
        return understood(status, text, file)

    monkeypatch.setattr(loader, "_understood", listen)
    assert not loader.ask(path).refusal
    assert "libc.so.6" in said[0]
    assert "ran" not in said[0].split()


def test_the_sandbox_only_reads(workshop: Workshop, tmp_path: Path) -> None:
    folder, _ = workshop.objects({"escapes.cpp": ESCAPES})
    run(["g++", "escapes.cpp", "-o", "escapes"], cwd=folder)
    victim = tmp_path / "victim"
    victim.write_text("kept")
    words = [sys.executable, "-I", "-S", sandbox.__file__, str(folder / "escapes"), str(victim)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={}, timeout=60)
    *tried, reading = done.stdout.splitlines()
    assert (done.returncode, reading, victim.read_text()) == (0, "can read", "kept")
    assert len(tried) == 9
    assert {line.rsplit(" ", 2)[1:][0] for line in tried} == {"-1"}
    assert {int(line.rsplit(" ", 1)[1]) for line in tried} == {errno.ENOSYS}


def test_without_a_sandbox_nothing_is_loaded(plain: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "refusing.py").write_text(f"import sys; print('no seccomp'); sys.exit({sandbox.REFUSED})\n")
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "refusing.py"))
    check = next(c for c in audit(plain, Options(load=True)).checks if c.name == "the loader")
    assert check.verdict is Verdict.SKIP
    assert "no seccomp" in check.found


def test_the_limits_are_set_before_the_program_runs(tmp_path: Path) -> None:
    """An endless output ends at OUTPUT bytes."""
    endless = tmp_path / "endless"
    words = [sys.executable, "-I", "-S", sandbox.__file__, "/usr/bin/env", "cat", "/dev/zero"]
    with endless.open("wb") as stream:
        done = subprocess.run(words, stdout=stream, stderr=subprocess.DEVNULL, check=False, env={}, timeout=60)
    assert done.returncode
    assert endless.stat().st_size == sandbox.OUTPUT
