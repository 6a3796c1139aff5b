"""``python -m flashmoe verify FILE.whl``: does this wheel match its provenance, and can it be rebuilt from its commit?

Without ``--rebuild``: RECORD, the library's hash, each embedded device binary's hash, the lock files and the commit of the
clone it runs in. With ``--rebuild``: the commit is rebuilt in its own work tree and compared. Device binaries depend only
on the locked compiler, so their hashes must match on any machine; the host part also depends on g++.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe.errors import ExitCode, FlashmoeError
from flashmoe.tools.audit.embedded import Binary, read_embedded
from flashmoe.tools.audit.errors import AuditError
from flashmoe.tools.audit.inputs import Wheel, unpack
from flashmoe.tools.audit.wheels import check_provenance, check_record, read_provenance
from flashmoe.tools.progress import Progress
from flashmoe.tools.report import Check, Report, Verdict, host_environment, utc_now, write_report

LIBRARY = "flashmoe/libflashmoe.so"
RECORD = "flashmoe/provenance.json"
GIT_LIMIT, BUILD_LIMIT = 120, 3600  # seconds


class VerifyError(FlashmoeError, RuntimeError):
    """The wheel cannot be checked at all, or its commit cannot be built."""


@dataclass(frozen=True)
class Content:
    """A wheel of ours: its provenance, the hash of every member, and its device binaries."""

    wheel: Wheel
    sha256: str
    provenance: Mapping[str, Any]
    members: Mapping[str, str]
    binaries: tuple[Binary, ...]

    @property
    def cubins(self) -> dict[str, str]:
        """sha256 of the bytes that are embedded, by name and target."""
        return {binary.label: binary.actual_sha256 for binary in self.binaries}


def read_wheel(path: Path, scratch: Path) -> Content:
    """Open a wheel of ours. Raises VerifyError for another project's, AuditError for a damaged one."""
    wheel = unpack(path, scratch)
    if LIBRARY not in wheel.names:
        msg = f"{path.name} has no {LIBRARY}, so it is not a wheel of flashmoe; `python -m flashmoe audit` accepts any wheel"
        raise VerifyError(msg)
    record = read_provenance(wheel.other.get(RECORD, b""))
    if record is None:
        msg = f"{path.name} has no readable {RECORD}, so its commit and compilers are unknown; build it again"
        raise VerifyError(msg)
    members = {name: hashlib.sha256(_member(wheel, name)).hexdigest() for name in wheel.names}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Content(wheel, digest, record, members, read_embedded(wheel.root / LIBRARY))


def _member(wheel: Wheel, name: str) -> bytes:

    with zipfile.ZipFile(wheel.path) as archive:
        return archive.read(name)


def check_content(content: Content) -> list[Check]:
    """The checks that need only the file."""
    library = content.wheel.root / LIBRARY
    return [*check_record(content.wheel), *check_provenance(content.provenance, library, content.binaries)]


def check_locks(stated: Mapping[str, str], root: Path | None) -> Check:
    """The lock files of the checkout are those that the wheel was built with."""
    name = "lock files"
    if root is None:
        return Check(
            name, Verdict.SKIP, "no clone of flashmoe here", next_step="run it in a clone, or with --root CLONE"
        )
    wrong = []
    for lock in ("build.txt",):  # the others do not affect a wheel
        path = root / "lockfiles" / lock
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "not there"
        if stated.get(lock) != found:
            wrong.append(f"{lock}: {found[:16]} here, {str(stated.get(lock))[:16]} in the wheel")
    if wrong:
        return Check(
            name, Verdict.WARN, "; ".join(wrong), "the same sha256",
            "The checkout is of another commit than the wheel, or its lock was edited.",
            "git checkout the wheel's commit, or verify with --rebuild, which does that",
        )  # fmt: skip
    return Check(name, Verdict.PASS, "build.txt is the one that the wheel was built with")


def check_commit(provenance: Mapping[str, Any], root: Path | None) -> Check:
    """The commit is stated, was clean, and the clone has it."""
    name, commit = "commit", str(provenance.get("commit"))
    if provenance.get("dirty") or commit == "unknown":
        return Check(
            name, Verdict.WARN, f"{commit[:12]}, with uncommitted changes", "a clean commit",
            "These sources cannot be rebuilt.", "build from a clean clone",
        )  # fmt: skip
    if root is None:
        return Check(name, Verdict.SKIP, commit, next_step="run it in a clone, or with --root CLONE")
    if _git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return Check(
            name, Verdict.FAIL, f"{commit[:12]} is not in this clone", "a commit of the project",
            "Either the clone is shallow or old, or the wheel came from elsewhere.", "git fetch --unshallow --all, then again",
        )  # fmt: skip
    stated, found = provenance.get("source_date_epoch"), _git(root, "log", "-1", "--format=%ct", commit)
    if str(stated) != found:
        return Check(
            name, Verdict.FAIL, f"time {stated}", f"time {found} of {commit[:12]}", "", "the record was edited"
        )
    return Check(name, Verdict.PASS, f"{commit[:12]}, clean, in this clone")


def compare(given: Content, rebuilt: Content) -> list[Check]:
    """The given wheel against one rebuilt from its commit."""
    checks = [*_compare_cubins(given.cubins, rebuilt.cubins)]
    if given.sha256 == rebuilt.sha256:
        return [*checks, Check("rebuilt wheel", Verdict.PASS, f"byte for byte the same, sha256 {given.sha256}")]
    names = sorted({*given.members, *rebuilt.members})
    differing = [name for name in names if given.members.get(name) != rebuilt.members.get(name)]
    theirs, ours = given.provenance["compilers"].get("cxx"), rebuilt.provenance["compilers"].get("cxx")
    expected_to = {LIBRARY, RECORD} | {name for name in names if name.endswith(("/RECORD", ".cdx.json"))}
    if theirs != ours and set(differing) <= expected_to:
        why = f"The host part was compiled by {theirs} there and {ours} here; device binaries do not depend on it."
        step = f"rebuild with {theirs} (CXX=...), or in the pinned image, for a byte-by-byte comparison"
        return [
            *checks,
            Check("rebuilt wheel", Verdict.WARN, f"differs in {', '.join(differing)}", "the same", why, step),
        ]
    why = "The same commit and compilers must give the same bytes."
    step = "do not trust this file until the difference is explained (diffoscope GIVEN REBUILT; --keep keeps the rebuilt wheel)"
    return [
        *checks,
        Check("rebuilt wheel", Verdict.FAIL, f"differs in {', '.join(differing[:8])}", "the same", why, step),
    ]


def _compare_cubins(given: Mapping[str, str], rebuilt: Mapping[str, str]) -> list[Check]:
    wrong = [name for name in sorted({*given, *rebuilt}) if given.get(name) != rebuilt.get(name)]
    if not wrong:
        return [Check("rebuilt device binaries", Verdict.PASS, f"{len(given)} of {len(given)} have the same sha256")]
    return [
        Check(
            f"rebuilt device binary {name}",
            Verdict.FAIL,
            given.get(name, "not in the wheel")[:16],
            rebuilt.get(name, "not in the rebuilt one")[:16],
            "The locked compiler gives the same bytes on every machine, so this one came from other sources or was edited.",
            "do not use the wheel",
        )
        for name in wrong[:20]
    ]


def rebuild(content: Content, root: Path, folder: Path) -> Path:
    """The wheel that the given one's commit builds on this machine, in ``folder``. Raises VerifyError."""
    commit = str(content.provenance["commit"])
    tree = folder / "tree"
    if _git(root, "worktree", "add", "--detach", "--force", str(tree), commit) is None:
        msg = f"git cannot check out {commit[:12]} of {root.name}; git fetch --unshallow --all, then again"
        raise VerifyError(msg)
    try:
        _build(tree, [str(name) for name in content.provenance["targets"]])
        (wheel,) = (tree / "dist").glob("*.whl")
        return wheel.replace(folder / wheel.name)
    finally:
        _git(root, "worktree", "remove", "--force", str(tree))


def _build(tree: Path, targets: Sequence[str]) -> None:
    dropped = ("FA_ARCHS", "SOURCE_DATE_EPOCH", "PYTHONPATH", "FLASHMOE_CACHE_DIR")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    environment["FLASHMOE_ARCHS"] = ",".join(targets) or "none"
    if not (tree / "nox").is_file():
        msg = "the commit has no ./nox, so it is not a buildable commit of flashmoe"
        raise VerifyError(msg)
    lines: list[str] = []
    with (
        Progress("rebuilding") as progress,
        subprocess.Popen(
            ["./nox", "-s", "build"], cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            progress.note(line.strip()[:80])
    if process.returncode != 0:
        msg = f"the build of the commit failed with exit status {process.returncode}:\n{''.join(lines[-15:])}"
        raise VerifyError(msg)


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-c", "safe.directory=*", *arguments]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=GIT_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def find_clone(start: Path) -> Path | None:
    """The clone of flashmoe that ``start`` lies in."""
    top = _git(start, "rev-parse", "--show-toplevel")
    root = Path(top) if top else None
    return root if root is not None and (root / "lockfiles" / "build.txt").is_file() else None


def verify(path: Path, *, root: Path | None, again: bool, keep: Path | None = None) -> Report:
    """Every check on one wheel."""
    started, clock = utc_now(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flashmoe-verify-") as scratch:
        folder = Path(scratch)
        content = read_wheel(path, folder / "given")
        checks = check_content(content)
        checks += [check_commit(content.provenance, root), check_locks(content.provenance.get("locks", {}), root)]
        if again:
            if root is None or content.provenance.get("dirty"):
                msg = "--rebuild needs a clone (--root CLONE) and a wheel of a clean commit"
                raise VerifyError(msg)
            built = rebuild(content, root, folder)
            checks += compare(content, read_wheel(built, folder / "rebuilt"))
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / built.name).write_bytes(built.read_bytes())
    data = {
        "wheel": path.name,
        "sha256": content.sha256,
        "commit": content.provenance.get("commit"),
        "compilers": content.provenance.get("compilers"),
        "binaries": content.cubins,
    }
    return Report("verify", tuple(checks), data, host_environment(), (), started, round(time.monotonic() - clock, 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--rebuild", action="store_true", help="rebuild its commit and compare every byte")
    parser.add_argument("--root", type=Path, help="a clone of flashmoe (default: the one around this folder)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the rebuilt wheel there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")


def run(args: argparse.Namespace) -> int:
    """Prints one line per check; returns the ExitCode."""
    root = args.root.resolve() if args.root else find_clone(Path.cwd())
    try:
        report = verify(args.wheel, root=root, again=args.rebuild, keep=args.keep)
    except AuditError as error:
        print(f"{type(error).__name__}: {error}; next: {error.next_step}", file=sys.stderr)
        return ExitCode.FAILED
    for check in report.checks:
        print(f"{check.verdict}  {check.name}: {check.found}")
        if check.verdict in (Verdict.FAIL, Verdict.WARN):
            shown = {"expected": check.expected, "why": check.why, "next": check.next_step}
            print("\n".join(f"      {word}: {text}" for word, text in shown.items() if text))
    print(f"verify {report.verdict}: {json.dumps(report.data['wheel'])} of commit {str(report.data['commit'])[:12]}")
    if args.json:
        write_report(args.json, report)
    return int(report.exit_code)
