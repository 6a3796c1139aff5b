"""Rebuilds the commit on this machine and compares the given wheel with the result."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

from flashmoe_tools.progress import Progress
from flashmoe_tools.report import Check, Verdict
from flashmoe_tools.verify.content import LIBRARY, RECORD, Content
from flashmoe_tools.verify.errors import VerifyError
from flashmoe_tools.verify.files import printable
from flashmoe_tools.verify.repository import Clone, check_out, neutral_environment

DROPPED = ("FA_ARCHS", "FLASHMOE_PLATFORM", "SOURCE_DATE_EPOCH", "PYTHONPATH", "FLASHMOE_CACHE_DIR")
SHOWN = 8


def rebuild(content: Content, clone: Clone, tags: Collection[str], folder: Path) -> Path:
    """Builds a wheel from the given one's commit in ``folder`` and returns its path. Raises VerifyError."""
    tree = folder / "tree"
    check_out(clone, content.stated.commit, tree, tags)
    if not (tree / "nox").is_file():
        msg = "the commit has no ./nox, so it is not a buildable commit of flashmoe"
        raise VerifyError(msg)
    _build(tree, build_environment(content, os.environ))
    (wheel,) = (tree / "dist").rglob("*.whl")
    return wheel.replace(folder / wheel.name)


def build_environment(content: Content, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the build: the wheel's targets, and its host compiler if this machine has it."""
    environment = {name: value for name, value in neutral_environment(environ).items() if name not in DROPPED}
    environment["FLASHMOE_ARCHS"] = ",".join(content.stated.targets) or "none"
    prefix = "" if content.machine == platform.machine() else f"{content.machine}-linux-gnu-"
    if prefix:
        environment["FLASHMOE_PLATFORM"] = content.machine
    compiler = find_compiler(content.stated.cxx, environ, prefix)
    if compiler:
        environment["CXX"] = compiler
    return environment


def find_compiler(stated: str, environ: Mapping[str, str], prefix: str = "") -> str:
    """A g++ on PATH of exactly the stated version; empty if there is none, in which case the build uses its default.

    ``prefix``: of a cross compiler's name, such as ``aarch64-linux-gnu-``.
    """
    match = re.fullmatch(r"g\+\+ ((\d+)\.\d+\.\d+)", stated)
    if match is None:
        return ""
    for name in ("g++", f"g++-{match[2]}"):
        found = shutil.which(prefix + name, path=environ.get("PATH"))
        if found is None:
            continue
        done = subprocess.run([found, "-dumpfullversion"], capture_output=True, text=True, timeout=30, check=False)
        if done.stdout.strip() == match[1]:
            return found
    return ""


def _build(tree: Path, environment: Mapping[str, str]) -> None:
    lines: list[str] = []
    with (
        Progress("rebuilding") as progress,
        subprocess.Popen(
            ["./nox", "-s", "build"], cwd=tree, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
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


def compare(given: Content, rebuilt: Content) -> list[Check]:
    """Compares the given wheel with one rebuilt from its commit."""
    checks = _compare_cubins(given.cubins, rebuilt.cubins)
    if given.sha256 == rebuilt.sha256:
        return [*checks, Check("rebuilt wheel", Verdict.PASS, f"byte for byte the same, sha256 {given.sha256}")]
    names = sorted({*given.members, *rebuilt.members})
    differing = [name for name in names if given.members.get(name) != rebuilt.members.get(name)]
    found = f"differs in {', '.join(map(printable, differing[:SHOWN])) or 'the archive around its members'}"
    host_part = {LIBRARY, RECORD} | {name for name in names if name.endswith((".dist-info/RECORD", ".cdx.json"))}
    if differing and set(differing) <= host_part and given.stated.cxx != rebuilt.stated.cxx:
        theirs, ours = printable(given.stated.cxx), rebuilt.stated.cxx
        why = (
            f"The wheel says that its host part was compiled by {theirs}; here it was {ours}. That may explain the difference, and "
            "an edited library may say the same of itself."
        )
        step = f"rebuild where {theirs} is (a g++ of that version on PATH is taken), or in the pinned image"
        return [*checks, Check("rebuilt wheel", Verdict.UNPROVED, found, "the same", why, step)]
    why = "The same commit and compilers must give the same bytes."
    step = "do not trust this file until the difference is explained (diffoscope GIVEN REBUILT; --keep keeps the rebuilt wheel)"
    return [*checks, Check("rebuilt wheel", Verdict.FAIL, found, "the same", why, step)]


def _compare_cubins(given: Mapping[str, str], rebuilt: Mapping[str, str]) -> list[Check]:
    wrong = [name for name in sorted({*given, *rebuilt}) if given.get(name) != rebuilt.get(name)]
    if not given and not rebuilt:
        return [Check("rebuilt device binaries", Verdict.PASS, "a build for the CPU only has none")]
    if not wrong:
        return [Check("rebuilt device binaries", Verdict.PASS, f"{len(given)} of {len(given)} have the same sha256")]
    return [
        Check(
            f"rebuilt device binary {printable(name)}",
            Verdict.FAIL,
            given.get(name, "not in the wheel")[:16],
            rebuilt.get(name, "not in the rebuilt one")[:16],
            "The locked compiler gives the same bytes on every machine, so this one came from other sources or was edited.",
            "do not use the wheel",
        )
        for name in wrong[:20]
    ]
