"""A clone of the commit under other conditions: another user, umask and path, other file times and order of creation."""

import os
import pwd
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe.errors import BuildError

OTHER_USER = "nobody"


@dataclass(frozen=True)
class BuildEnvironment:
    """The conditions of one build."""

    name: str
    folder: Path
    umask: int
    variables: Mapping[str, str]
    reverse: bool = False  # create files in reverse order, with other times
    prefix: tuple[str, ...] = ()  # wraps the build command
    user: str = ""


def check_out(environment: BuildEnvironment, root: Path) -> None:
    """A clone of HEAD with this environment's file order and times."""
    folder = environment.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    clone = ["git", "-c", "safe.directory=*", "clone", "-q", "--no-hardlinks", "--no-checkout", str(root), str(folder)]
    _run(clone, cwd=folder.parent)
    listed = _run(["git", "ls-tree", "-rz", "--name-only", "HEAD"], cwd=folder)
    ordered = sorted(filter(None, listed.split("\0")), reverse=environment.reverse)
    for start in range(0, len(ordered), 50):
        _run(["git", "checkout", "-q", "HEAD", "--", *ordered[start : start + 50]], cwd=folder)
    if environment.reverse:
        for name in ordered:
            os.utime(folder / name, (1_500_000_000, 1_500_000_000), follow_symlinks=False)
        _run(["git", "update-index", "-q", "--refresh"], cwd=folder)
    if environment.user:
        account = pwd.getpwnam(environment.user)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)


def _run(command: Sequence[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        msg = f"{' '.join(command[:3])}: {done.stderr.strip()[-1000:]}"
        raise BuildError(msg)
    return done.stdout
