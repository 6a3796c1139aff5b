"""``nox -s reproduce``: builds the same commit three times in different environments and compares every byte.

The environments differ in path, file system, user, umask, locale, time zone, clock (where faketime is installed), hash seed, job
count, file times, the order in which files were created, and cache (the third uses what the first compiled). Whatever cannot
be varied on this machine is reported as SKIP.
"""

import argparse
import hashlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe.errors import ExitCode
from flashmoe_build.compile.archs import VARIABLES
from flashmoe_build.program import ROOT, Stopwatch, ending, finish, run
from flashmoe_build.release import independent
from flashmoe_build.release.build_environment import OTHER_USER, BuildEnvironment, check_out
from flashmoe_build.release.version import find_commit
from flashmoe_tools.bench.stopping import stop_signals
from flashmoe_tools.report import Check, Report, Verdict

TIME_LIMIT = 3600  # seconds, for one build
INTERRUPTED = "interrupted"
MEMORY_NEEDED = 1e9  # bytes: a build folder with every target, plus headroom


@dataclass(frozen=True)
class Machine:
    """What can be varied on this machine; an empty value means that it cannot."""

    faketime: str
    other_user: str
    why_no_user: str
    memory_folder: str  # a different kind of file system, which lists files in another order


def look_around() -> Machine:
    user, why = _other_user()
    shared = Path("/dev/shm")
    usable = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > MEMORY_NEEDED
    return Machine(shutil.which("faketime") or "", user, why, str(shared) if usable else "")


def _other_user() -> tuple[str, str]:
    """(a user that can run this interpreter, or "", and then the reason)."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return "", "not root, so no other user to build as"
    # Through a shell: the first program that setpriv starts may keep root's right to bypass folder permissions.
    command = [*_as_user(OTHER_USER), "/bin/sh", "-c", 'exec "$0" -c "import sys"', sys.executable]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, cwd="/")
    return (OTHER_USER, "") if done.returncode == 0 else ("", f"{OTHER_USER} may not run this interpreter (its folder)")


def _as_user(name: str) -> tuple[str, ...]:
    account = pwd.getpwnam(name)
    return ("setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups")


def plan(jobs: int, machine: Machine, scratch: Path, strange: Path) -> tuple[tuple[BuildEnvironment, ...], list[Check]]:
    """Three environments as different as this machine allows, and a check for each condition that was or was not varied."""
    always = ("path", "umask", "locale", "time zone", "hash seed", "job count", "file times, creation order", "cache")
    checks = [Check(f"varied: {what}", Verdict.PASS) for what in always]
    prefix: tuple[str, ...] = ()
    for what, usable, found, step in (
        ("clock", machine.faketime, "faketime is not installed", "apt-get install faketime"),
        ("user", machine.other_user, machine.why_no_user, "as root, with a Python that every user may run"),
        ("file system", machine.memory_folder, "no memory file system with room", ""),
    ):
        verdict = Verdict.PASS if usable else Verdict.SKIP
        checks.append(Check(f"varied: {what}", verdict, "" if usable else found, next_step="" if usable else step))
    if machine.faketime:
        prefix = (machine.faketime, "-f", "+400d")
    if machine.other_user:
        prefix = (*_as_user(machine.other_user), *prefix)
    plain = {"LC_ALL": "C", "TZ": "UTC", "MAX_JOBS": str(jobs), "PYTHONHASHSEED": "1"}
    other = {"LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", "TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "2"}
    other["MAX_JOBS"] = str(jobs - 1 if jobs > 1 else 2)
    first = BuildEnvironment("plain", scratch / "a", 0o022, plain)
    folder = strange / "a much/longer path, with spaces"
    second = BuildEnvironment("strange", folder, 0o002, other, reverse=True, prefix=prefix, user=machine.other_user)
    cached = {**other, "FLASHMOE_CACHE_DIR": str(first.folder / "build" / "cache")}
    return (first, second, BuildEnvironment("cached", scratch / "cached one", 0o077, cached, reverse=True)), checks


def build_in(environment: BuildEnvironment, archs: str) -> Path:
    """The wheel that this environment builds."""
    dropped = {*VARIABLES, "SOURCE_DATE_EPOCH", "FLASHMOE_CACHE_DIR"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    own = {"FLASHMOE_ARCHS": archs, "HOME": str(environment.folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*environment.prefix, sys.executable, "-m", "flashmoe_build"]
    variables = {**kept, **own, **environment.variables}
    run(
        command,
        f"environment {environment.name}",
        time_limit=TIME_LIMIT,
        cwd=environment.folder,
        environment=variables,
        umask=environment.umask,
    )
    (wheel,) = (environment.folder / "dist").glob("*.whl")
    return wheel


def members(wheel: Path) -> dict[str, str]:
    """sha256 of every file in a wheel, and of the wheel under its own name."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}
    return {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest(), **inside}


def compare(left: Mapping[str, str], right: Mapping[str, str], environments: str) -> list[Check]:
    """One check per file; a file on only one side is a difference."""
    checks = []
    for name in sorted({*left, *right}):
        same = left.get(name) == right.get(name)
        found, expected = right.get(name, "not there"), left.get(name, "not there")
        step = "" if same else "unpack both wheels and run diffoscope on them (-- --keep DIR)"
        verdict = Verdict.PASS if same else Verdict.FAIL
        checks.append(Check(f"same bytes, {environments}: {name}", verdict, found, expected, next_step=step))
    return checks


def binaries(folder: Path) -> dict[str, str]:
    """sha256 of every device binary, from the provenance of the build in ``folder``."""
    stated = json.loads((folder / "build" / "provenance.json").read_text(encoding="utf-8"))
    return {f"{item['name']}.{item['target']}": item["sha256"] for item in stated["binaries"]}


def _explain(left: Path, right: Path) -> str:
    program = shutil.which("diffoscope")
    if program is None:
        return "diffoscope is not installed, so there is no explanation (apt-get install diffoscope-minimal)"
    command = [program, "--max-report-size", "4000", str(left), str(right)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    return done.stdout[:4000]


def reproduce(archs: str, jobs: int, scratch: Path, *, root: Path = ROOT, keep: Path | None = None) -> Report:
    """Build in every environment and compare each with the first. After Ctrl-C the comparisons made so far remain."""
    clock, commit, machine = Stopwatch(), find_commit(root), look_around()
    scratch.chmod(0o755)
    strange = Path(tempfile.mkdtemp(prefix="flashmoe-reproduce-", dir=machine.memory_folder or scratch))
    strange.chmod(0o755)
    try:
        environments, checks = plan(jobs, machine, scratch, strange)
        if commit.dirty:
            found = "uncommitted changes were not built"
            checks.append(Check("clean checkout", Verdict.WARN, found=found))
        data: dict[str, Any] = {"commit": commit.commit, "archs": archs, "seconds": {}, "explanations": {}}
        try:
            for environment in environments:
                begun = time.monotonic()
                check_out(environment, root)
                wheel = build_in(environment, archs)
                data["seconds"][environment.name] = round(time.monotonic() - begun, 1)
                if keep is not None:
                    (keep / environment.name).mkdir(parents=True, exist_ok=True)
                    shutil.copy(wheel, keep / environment.name)
                if environment is environments[0]:
                    first = wheel
                    data["wheel_sha256"] = members(wheel)[wheel.name]
                    data["binaries"] = len(binaries(environment.folder))
                    continue
                pair = f"{environments[0].name} and {environment.name}"
                found_checks = compare(members(first), members(wheel), pair)
                if any(check.verdict is Verdict.FAIL for check in found_checks):
                    data["explanations"][pair] = _explain(first, wheel)
                checks += found_checks + compare(binaries(environments[0].folder), binaries(environment.folder), pair)
        except KeyboardInterrupt:
            built = f"{len(data['seconds'])} of {len(environments)} builds were done"
            checks.append(Check(INTERRUPTED, Verdict.FAIL, built, "all of them, compared with the first"))
    finally:
        shutil.rmtree(strange, ignore_errors=True)
    return clock.report("reproduce", checks, data)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_build.release.reproduce", description=__doc__
    )
    parser.add_argument("--archs", help="targets to build (default: all)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="compilers at once in the first environment")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the wheel of each environment there")
    parser.add_argument(
        "--independent", action="store_true", help="rebuild a wheel of HEAD in two other systems instead"
    )
    parser.add_argument(
        "--wheel", type=Path, help="with --independent: which wheel (default: HEAD's in dist/, else built)"
    )
    parser.add_argument(
        "--bases", type=Path, metavar="DIR", help="with --independent: keep and reuse the systems there"
    )
    options = parser.parse_args(arguments)
    if options.wheel is not None and options.archs is not None:
        parser.error("--archs says what to build; the wheel of --wheel has its targets")
    if not options.independent and (options.wheel is not None or options.bases is not None):
        parser.error("--wheel and --bases go with --independent")
    archs = options.archs or "all"
    if options.independent:
        return independent.main(options.wheel, archs, options.jobs, options.bases, options.keep)

    def build_and_compare() -> int:
        with stop_signals(), tempfile.TemporaryDirectory(prefix="flashmoe-reproduce-") as scratch:
            report = reproduce(archs, options.jobs, Path(scratch), keep=options.keep)
        finish(report)
        show(report)
        interrupted = any(check.name == INTERRUPTED for check in report.checks)
        return ExitCode.INTERRUPTED if interrupted else report.exit_code

    return ending(build_and_compare)


def show(report: Report) -> None:
    """What differs, what could not be varied, and one summary line."""
    for check in report.checks:
        if check.verdict is not Verdict.PASS or not check.name.startswith("same bytes"):
            print(f"{check.verdict} {check.name} {check.found}".rstrip())
    for pair, text in report.data["explanations"].items():
        print(f"{pair}:\n{text}")
    same = sum(check.name.startswith("same bytes") and check.verdict is Verdict.PASS for check in report.checks)
    found = f"{same} comparisons of files and device binaries identical"
    print(f"reproduce {report.verdict}: {found}, {report.seconds:.0f} s")


if __name__ == "__main__":
    raise SystemExit(main())
