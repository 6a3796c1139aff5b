"""``nox -s reproduce``: builds the same commit twice in worlds that differ, and compares every byte.

The worlds differ in path, user, umask, locale, time zone, clock (where faketime is installed), job count, file times, the
order in which files were created, and cache. What could not be varied on this machine is said, not passed over.
"""

from __future__ import annotations

import argparse
import hashlib
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

from flashmoe.errors import BuildError, ExitCode, FlashmoeError
from flashmoe.progress import Progress
from flashmoe.report import Check, Report, Verdict, host_environment, utc_now, write_report
from flashmoe_build.archs import VARIABLES
from flashmoe_build.provenance import find_commit

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT = 3600  # seconds of one build
OTHER_USER = "nobody"


@dataclass(frozen=True)
class World:
    """The circumstances of one build."""

    name: str
    folder: str  # below the scratch folder
    umask: int
    variables: Mapping[str, str]
    reverse: bool  # files are created in reverse order, with other times
    prefix: tuple[str, ...] = ()  # wraps the build command
    user: str = ""


def worlds(jobs: int) -> tuple[tuple[World, World], list[Check]]:
    """Two worlds as far apart as this machine allows, and a check for each thing that was or was not varied."""
    checks = [
        Check(f"varied: {what}", Verdict.PASS)
        for what in ("path", "umask", "locale", "time zone", "job count", "file times and creation order", "cache")
    ]
    prefix: tuple[str, ...] = ()
    if shutil.which("faketime"):
        prefix = ("faketime", "-f", "+400d")
        checks.append(Check("varied: clock", Verdict.PASS))
    else:
        checks.append(
            Check(
                "varied: clock", Verdict.SKIP, found="faketime is not installed", next_step="apt-get install faketime"
            )
        )
    user = ""
    if os.geteuid() == 0 and shutil.which("setpriv"):
        user = OTHER_USER
        account = pwd.getpwnam(OTHER_USER)
        prefix = ("setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups", *prefix)
        checks.append(Check("varied: user", Verdict.PASS))
    else:
        checks.append(Check("varied: user", Verdict.SKIP, found="not root, so no other user to build as"))
    plain = World("plain", "a", 0o022, {"LC_ALL": "C", "TZ": "UTC", "MAX_JOBS": str(jobs)}, reverse=False)
    strange = {"LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", "TZ": "Pacific/Kiritimati", "MAX_JOBS": str(max(1, jobs - 1))}
    other = World("strange", "a much/longer path, with spaces", 0o002, strange, reverse=True, prefix=prefix, user=user)
    return (plain, other), checks


def check_out(world: World, scratch: Path) -> Path:
    """A clone of HEAD as this world has it."""
    folder = scratch / world.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run(["git", "clone", "-q", "--no-hardlinks", "--no-checkout", str(ROOT), str(folder)], cwd=scratch)
    names = subprocess.check_output(["git", "ls-tree", "-rz", "--name-only", "HEAD"], cwd=folder, text=True).split("\0")
    ordered = sorted(filter(None, names), reverse=world.reverse)
    _run(["git", "checkout", "-q", "HEAD", "--", *ordered[:1]], cwd=folder)
    for start in range(0, len(ordered), 50):
        _run(["git", "checkout", "-q", "HEAD", "--", *ordered[start : start + 50]], cwd=folder)
    if world.reverse:
        for name in ordered:
            os.utime(folder / name, (1_500_000_000, 1_500_000_000), follow_symlinks=False)
        _run(["git", "update-index", "-q", "--refresh"], cwd=folder)
    if world.user:
        account = pwd.getpwnam(world.user)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)
    return folder


def build_in(world: World, folder: Path, archs: str) -> Path:
    """The wheel that this world makes, from nothing."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in {*VARIABLES, "SOURCE_DATE_EPOCH", "FLASHMOE_CACHE_DIR"}
    }
    environment = {
        **kept,
        **world.variables,
        "FLASHMOE_ARCHS": archs,
        "HOME": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [*world.prefix, sys.executable, "-m", "flashmoe_build"]
    lines: list[str] = []
    with (
        Progress(f"world {world.name}") as progress,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=world.umask,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            progress.note(line.strip())
    if process.returncode != 0:
        msg = f"world {world.name}: the build ended with {process.returncode}:\n{''.join(lines[-20:])}"
        raise BuildError(msg)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def members(wheel: Path) -> dict[str, str]:
    """sha256 of every file in a wheel, and of the wheel under its own name."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}
    return {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest(), **inside}


def compare(left: Mapping[str, str], right: Mapping[str, str]) -> list[Check]:
    """One check a file; a file on one side only is a difference."""
    checks = []
    for name in sorted({*left, *right}):
        same = left.get(name) == right.get(name)
        checks.append(
            Check(
                f"same bytes: {name}",
                Verdict.PASS if same else Verdict.FAIL,
                found=right.get(name, "not there"),
                expected=left.get(name, "not there"),
                next_step="" if same else "unpack both wheels and run diffoscope on them",
            )
        )
    return checks


def binaries(folder: Path) -> dict[str, str]:
    """sha256 of every device binary that the build in ``folder`` left in its provenance."""
    import json

    stated = json.loads((folder / "build" / "provenance.json").read_text(encoding="utf-8"))
    return {f"{item['name']}.{item['target']}": item["sha256"] for item in stated["binaries"]}


def _explain(left: Path, right: Path) -> str:
    program = shutil.which("diffoscope")
    if program is None:
        return "diffoscope is not installed, so there is no explanation"
    done = subprocess.run(
        [program, "--max-report-size", "4000", str(left), str(right)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return done.stdout[:4000]


def _run(command: Sequence[str], cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        msg = f"{' '.join(command[:3])}: {done.stderr.strip()[-1000:]}"
        raise BuildError(msg)


def reproduce(archs: str, jobs: int, scratch: Path) -> Report:
    """Build in both worlds and compare."""
    started, clock = utc_now(), time.monotonic()
    commit = find_commit(ROOT)
    pair, checks = worlds(jobs)
    if commit.dirty:
        checks.append(Check("clean checkout", Verdict.WARN, found="uncommitted changes are not part of what was built"))
    scratch.chmod(0o755)
    built = {}
    for world in pair:
        folder = check_out(world, scratch)
        built[world.name] = (folder, build_in(world, folder, archs))
    (left_folder, left), (right_folder, right) = built["plain"], built["strange"]
    files = compare(members(left), members(right))
    kernels = compare(binaries(left_folder), binaries(right_folder))
    checks += [*files, *kernels]
    explanation = _explain(left, right) if any(check.verdict is Verdict.FAIL for check in files) else ""
    data = {
        "commit": commit.commit,
        "archs": archs,
        "wheel_sha256": members(left)[left.name],
        "binaries": len(kernels),
        "explanation": explanation,
    }
    return Report(
        "reproduce",
        tuple(checks),
        data,
        host_environment(),
        tuple(sys.argv[1:]),
        started,
        round(time.monotonic() - clock, 1),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flashmoe_build.reproduce", description=__doc__)
    parser.add_argument("--archs", default="all", help="targets to build (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once in the first world"
    )
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="flashmoe-reproduce-") as scratch:
            report = reproduce(options.archs, options.jobs, Path(scratch))
    except FlashmoeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.FAILED
    write_report(ROOT / "build" / "reports" / "reproduce.json", report)
    for check in report.checks:
        if check.verdict is not Verdict.PASS or not check.name.startswith("same bytes"):
            print(f"{check.verdict} {check.name} {check.found}")
    same = sum(check.name.startswith("same bytes") and check.verdict is Verdict.PASS for check in report.checks)
    print(f"reproduce {report.verdict}: {same} files and device binaries the same, {report.seconds:.0f} s")
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
