"""``nox -s reproduce -- --independent``: rebuilds the wheel in systems that share nothing with this one except the lock.

debootstrap makes two Debian systems, each with its own C library, g++, binutils, git and compression library. In each,
another user builds the wheel's commit in another path, with another file system layout:

- ``trixie``, another distribution with another g++. Device code is compiled from nothing. Everything that does not depend on the host
  compiler (every device binary, every file except the library and files that contain its hash) must have the same bytes.
- ``bookworm``, the versions of lockfiles/debian-bookworm.pins, whose g++ is the one used for releases. The whole wheel must
  have the same bytes. Device code comes from the first system's cache.

From this machine come the locked packages, checked by hash when they were installed, and the Python that runs them (the lock has no
packages for trixie's Python), both mounted read-only.
"""

import json
import os
import platform
import pwd
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashmoe._version import WHEEL_PREFIX
from flashmoe.errors import BuildError
from flashmoe_build.containers.base import bootstrap, installed, require_pinned
from flashmoe_build.program import ROOT, OutOfReachError, Stopwatch, ending, finish, run
from flashmoe_build.release.build_environment import OTHER_USER, BuildEnvironment, check_out
from flashmoe_build.release.version import find_commit, project_version
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.verify.content import Content, read_wheel
from flashmoe_tools.verify.rebuild import compare

OTHER_SUITE, PINNED_SUITE = "trixie", "bookworm"
TIME_LIMIT = 7200  # seconds, for one build
SOURCES = "srv/somewhere else/flashmoe"  # in the other system
LOCKED = "/srv/locked"
# Mounts that only the build sees; they end with it.
ENTER = """
root=$1 python=$2 locked=$3; shift 3
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev/shm"
for pair in "$python:$root$python" "$locked:$root/srv/locked"; do
    mount --bind "${pair%%:*}" "${pair#*:}"
    mount -o remount,bind,ro "${pair#*:}"
done
exec chroot --userspec="$USER_IN" "$root" /usr/bin/env -i "$@"
"""
BUILD = 'umask 027; cd "/$0"; exec /srv/locked/bin/python -m flashmoe_build'


def python_folder() -> Path:
    """The folder of this Python, which must be separate from the system to be mounted elsewhere."""
    folder = Path(sys.base_prefix).resolve()
    if folder == Path("/usr"):
        msg = "this Python lies in /usr, which the other system also has; name another: FLASHMOE_PYTHON (`uv python install 3.12`)"
        raise OutOfReachError(msg)
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        msg = "building in another system needs root (mounts, chroot) and unshare; run this session as root"
        raise OutOfReachError(msg)
    return folder


def prepare(suite: str, folder: Path) -> dict[str, str]:
    """Makes the system in ``folder`` if it is missing; returns its packages. The pinned system must have the pinned versions."""
    if not (folder / "usr" / "bin" / "g++").exists():
        shutil.rmtree(folder, ignore_errors=True)
        bootstrap(folder, suite=suite)
    packages = installed(folder)
    if suite == PINNED_SUITE:
        require_pinned(packages)
    return packages


def build_in(suite: str, system: Path, targets: str, jobs: int, cache: Path | None) -> Path:
    """The wheel of HEAD that ``system`` builds, as another user."""
    python, sources = python_folder(), system / SOURCES
    shutil.rmtree(sources.parent, ignore_errors=True)
    for mounted in (system / LOCKED[1:], Path(f"{system}{python}")):
        mounted.mkdir(parents=True, exist_ok=True)
        for parent in (mounted, *mounted.parents):
            if parent == system:
                break
            parent.chmod(0o755)  # /root too: the other user needs to traverse it
    (system / "dev" / "shm").mkdir(exist_ok=True)
    check_out(BuildEnvironment(suite, sources, 0o027, {}, reverse=True, user=OTHER_USER), ROOT)
    if cache is not None:
        shutil.copytree(cache, sources / "build" / "cache")
        for path in (sources / "build", *(sources / "build").rglob("*")):
            os.chown(path, sources.stat().st_uid, sources.stat().st_gid)
    account = pwd.getpwnam(OTHER_USER)
    variables = {
        "PATH": "/usr/bin:/bin", "HOME": "/tmp", "LC_ALL": "C.UTF-8", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "3",
        "MAX_JOBS": str(jobs), "FLASHMOE_ARCHS": targets, "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", ENTER, "sh", str(system), str(python)]
    command += [sys.prefix, *(f"{name}={value}" for name, value in variables.items()), "sh", "-c", BUILD, SOURCES]
    environment = {"PATH": os.environ["PATH"], "USER_IN": f"{account.pw_uid}:{account.pw_gid}"}
    run(command, f"building in {suite}", time_limit=TIME_LIMIT, cwd=system, environment=environment)
    (wheel,) = (sources / "dist").glob("*.whl")
    return wheel


def check_rebuilt(suite: str, given: Content, rebuilt: Content) -> list[Check]:
    """The comparison of `verify --rebuild`. A difference that another host compiler explains is left to the other system to judge."""
    apart = _stated_apart(given, rebuilt)
    same = "the same but for the host compiler and its library"
    stated = Check(
        "provenance", Verdict.FAIL if apart else Verdict.PASS, f"differs: {', '.join(apart)}" if apart else same, same
    )
    checks = [*compare(given, rebuilt), stated]
    skipped = [replace(one, verdict=Verdict.SKIP) if one.verdict is Verdict.UNPROVED else one for one in checks]
    return [replace(one, name=f"{suite}: {one.name}") for one in skipped]


def _stated_apart(given: Content, rebuilt: Content) -> list[str]:
    def stated(content: Content) -> dict[str, Any]:
        record = json.loads(json.dumps(content.stated.record))
        record["compilers"].pop("cxx", None)
        return {**record, "extension_sha256": ""}

    left, right = stated(given), stated(rebuilt)
    return sorted(key for key in {*left, *right} if left.get(key) != right.get(key))


def rebuild(wheel: Path, jobs: int, bases: Path, scratch: Path, keep: Path | None) -> Report:
    """Build the wheel's commit in both systems and judge each."""
    clock = Stopwatch()
    given, commit = read_wheel(wheel, scratch / "given"), find_commit(ROOT)
    if given.stated.dirty or given.stated.commit != commit.commit or given.machine != platform.machine():
        found = f"{given.stated.commit[:12]}{' with changes' * given.stated.dirty} for {given.machine}"
        step = "check that commit out, or leave --wheel away"
        requirement = f"rebuilding needs a wheel of the commit that is checked out, {commit.commit[:12]}, for {platform.machine()}"
        msg = f"{wheel.name} is of commit {found}; {requirement}; {step}"
        raise BuildError(msg)
    checks, cache = [], None
    data: dict[str, Any] = {"wheel_sha256": given.sha256, "host_compiler": given.stated.cxx, "systems": {}}
    for suite in (OTHER_SUITE, PINNED_SUITE):
        packages, begun = prepare(suite, bases / suite), time.monotonic()
        made = build_in(suite, bases / suite, ",".join(given.stated.targets) or "none", jobs, cache)
        cache = made.parents[1] / "build" / "cache"
        if keep is not None:
            (keep / suite).mkdir(parents=True, exist_ok=True)
            shutil.copy(made, keep / suite)
        rebuilt = read_wheel(made, scratch / suite)
        checks += check_rebuilt(suite, given, rebuilt)
        data["systems"][suite] = {
            "host_compiler": rebuilt.stated.cxx,
            "packages": {name: packages[name] for name in ("g++", "binutils", "libc6", "zlib1g") if name in packages},
            "wheel_sha256": rebuilt.sha256,
            "members": rebuilt.members,
            "seconds": round(time.monotonic() - begun, 1),
        }
    if not any(row["wheel_sha256"] == given.sha256 for row in data["systems"].values()):
        pinned = data["systems"][PINNED_SUITE]["host_compiler"]
        step = f"build the wheel with {pinned} (the pinned image), the compiler that releases are built with"
        checks.append(
            Check(
                "whole wheel",
                Verdict.UNPROVED,
                f"compiled by {given.stated.cxx}, the pinned system has {pinned}",
                next_step=step,
            )
        )
    return clock.report("independent", checks, data)


def wheel_of_head(dist: Path, archs: str, jobs: int) -> Path:
    """The newest wheel in ``dist`` of the checked-out commit, built now if there is none."""
    commit = find_commit(ROOT)
    pattern = f"{WHEEL_PREFIX}{project_version(archs=archs)}-*_{platform.machine()}.whl"
    if not any(dist.glob(pattern)):
        if commit.dirty:
            found = f"{dist.name}/ contains no wheel of the checked-out commit, and files differ from that commit"
            msg = f"{found}; commit or stash them, or give the wheel (--wheel FILE)"
            raise BuildError(msg)
        command = [sys.executable, "-m", "flashmoe_build", "--archs", archs, "--dist", str(dist)]
        variables = {**os.environ, "MAX_JOBS": str(jobs)}
        run(command, "building the wheel of HEAD", time_limit=TIME_LIMIT, cwd=ROOT, environment=variables)
    return max(dist.glob(pattern), key=lambda path: path.stat().st_mtime)


def main(wheel: Path | None, archs: str, jobs: int, bases: Path | None, keep: Path | None) -> int:
    return ending(lambda: _rebuild_and_show(wheel, archs, jobs, bases, keep), "nothing was rebuilt")


def _rebuild_and_show(wheel: Path | None, archs: str, jobs: int, bases: Path | None, keep: Path | None) -> int:
    python_folder()  # fail before anything is built
    chosen = wheel or wheel_of_head(ROOT / "dist", archs, jobs)
    with tempfile.TemporaryDirectory(prefix="flashmoe-independent-") as temporary:
        scratch = Path(temporary)
        scratch.chmod(0o755)
        systems = (bases or scratch / "systems").resolve()
        systems.mkdir(parents=True, exist_ok=True)
        report = rebuild(chosen, jobs, systems, scratch, keep)
    for check in report.checks:
        print(f"{check.verdict} {check.name}: {check.found}")
        if check.next_step:
            print(f"     next: {check.next_step}")
    host = f"host part by {report.data['host_compiler']}"
    print(f"independent {report.verdict}: {chosen.name}, {host}, {report.seconds:.0f} s")
    return finish(report)
