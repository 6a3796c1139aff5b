"""Reads objects of a clone by full hash, and nothing else: no configuration, hook, filter, pager or signature program.

git finds the clone under the caller's own configuration, which decides whose repositories may be read (safe.directory).
Objects are then read through an empty repository of ours that borrows the clone's objects, so the clone's configuration
never takes effect.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flashmoe_tools.verify.errors import VerifyError

GIT_LIMIT = 120  # seconds
FULL_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# git's variables that select the caller's configuration.
_KEPT = re.compile(r"GIT_CONFIG_(GLOBAL|SYSTEM|NOSYSTEM|COUNT|(KEY|VALUE)_\d+)|GIT_CEILING_DIRECTORIES")
_NEUTRAL = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}


def neutral_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without any git configuration."""
    return {**{name: value for name, value in environ.items() if not name.startswith("GIT_")}, **_NEUTRAL}


@dataclass(frozen=True)
class Clone:
    """The locations of a clone's files and its objects."""

    root: Path
    objects: Path

    def tags_at(self, commit: str) -> frozenset[str]:
        """Names of the tags that point to this commit. References are read as is; nothing is verified or formatted."""
        done = _run(["git", "show-ref", "--tags", "--dereference"], self.root, _callers(os.environ))
        lines = (line.split(" ", 1) for line in done.stdout.decode(errors="replace").splitlines())
        return frozenset(
            name.removeprefix("refs/tags/").removesuffix("^{}") for digest, name in lines if digest == commit
        )


def find_clone(start: Path) -> Clone | None:
    """The clone around ``start``, or None. Raises VerifyError for one that git refuses to read."""
    command = ["git", "rev-parse", "--path-format=absolute", "--show-toplevel", "--git-common-dir"]
    try:
        done = _run(command, start, _callers(os.environ))
    except (OSError, VerifyError):
        return None
    text = done.stderr.decode(errors="replace")
    if "dubious ownership" in text or "safe.directory" in text:
        msg = (
            f"git refuses to read the repository around {start}: it belongs to another user. Clone it yourself, or, if you trust "
            "its owner, add it to git's safe.directory"
        )
        raise VerifyError(msg)
    lines = done.stdout.decode(errors="surrogateescape").splitlines()
    if done.returncode != 0 or len(lines) != 2:
        return None
    root, common = map(Path, lines)
    return Clone(root, common / "objects") if (common / "objects").is_dir() else None


def _callers(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, without git's variables that name a repository or a program."""
    kept = {name: value for name, value in environ.items() if not name.startswith("GIT_") or _KEPT.fullmatch(name)}
    return {**kept, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}


def _run(
    command: list[str], cwd: Path, environment: Mapping[str, str], given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            command, cwd=cwd, env=dict(environment), input=given, capture_output=True, timeout=GIT_LIMIT, check=False
        )
    except FileNotFoundError as error:
        msg = "git is not installed, and a commit cannot be read without it"
        raise VerifyError(msg) from error
    except subprocess.TimeoutExpired as error:
        msg = f"git did not answer within {GIT_LIMIT} s"
        raise VerifyError(msg) from error


@dataclass(frozen=True)
class Commit:
    """A commit as its object states it; ``tree`` maps each file's path to its object."""

    digest: str
    epoch: int
    tree: Mapping[str, str]


class Objects:
    """The objects of a clone, read through an empty repository in ``folder``."""

    def __init__(self, clone: Clone, folder: Path) -> None:
        self._folder = folder
        borrow_objects(clone, folder, bare=True)

    def commit(self, digest: str) -> Commit | None:
        """The commit with this full hash, or None if the clone lacks it. Raises VerifyError for other texts."""
        if not FULL_HASH.fullmatch(digest):
            msg = f"{digest!r} is not the full hash of a commit"
            raise VerifyError(msg)
        found = self._git("cat-file", "commit", digest)
        if found is None:
            return None
        header = found.split(b"\n\n", 1)[0].decode(errors="replace")
        stamp = re.search(r"^committer .* (\d+) [+-]\d+$", header, re.MULTILINE)
        listed = self._git("ls-tree", "-r", "-z", "--full-tree", digest)
        if stamp is None or listed is None:
            msg = f"the clone has only a part of commit {digest[:12]}; git fetch --unshallow, or a whole clone"
            raise VerifyError(msg)
        rows = (row.split("\t", 1) for row in listed.decode(errors="surrogateescape").split("\0") if row)
        tree = {path: fields.split()[2] for fields, path in rows if fields.split()[1] == "blob"}
        return Commit(digest, int(stamp[1]), tree)

    def read(self, digests: Iterable[str]) -> dict[str, bytes]:
        """The content of each of these blobs. Raises VerifyError if one is missing."""
        wanted = list(dict.fromkeys(digests))
        answer = self._git("cat-file", "--batch", given="".join(f"{digest}\n" for digest in wanted).encode()) or b""
        found: dict[str, bytes] = {}
        at = 0
        for digest in wanted:
            end = answer.find(b"\n", at)
            words = answer[at : max(end, at)].split()
            if len(words) != 3 or words[0].decode() != digest or words[1] != b"blob":
                msg = f"the clone lacks object {digest[:12]}; a whole clone has it (git fetch --unshallow --all)"
                raise VerifyError(msg)
            size = int(words[2])
            found[digest] = answer[end + 1 : end + 1 + size]
            at = end + 1 + size + 1
        return found

    def _git(self, *arguments: str, given: bytes = b"") -> bytes | None:
        done = _run(["git", *arguments], self._folder, neutral_environment(os.environ), given)
        return done.stdout if done.returncode == 0 else None


def borrow_objects(clone: Clone, folder: Path, *, bare: bool = False) -> None:
    """Creates a repository in ``folder`` with the clone's objects and nothing else of it."""
    form = ["--object-format=sha256"] if _uses_sha256(clone) else []
    command = ["git", "init", "--quiet", "--template=", *form, *(["--bare"] if bare else []), str(folder)]
    done = _run(command, Path(folder.anchor), neutral_environment(os.environ))
    if done.returncode != 0:
        msg = f"git cannot make a repository in {folder}: {done.stderr.decode(errors='replace').strip()}"
        raise VerifyError(msg)
    inner = folder if bare else folder / ".git"
    (inner / "objects" / "info").mkdir(parents=True, exist_ok=True)
    (inner / "objects" / "info" / "alternates").write_bytes(os.fsencode(clone.objects) + b"\n")


def _uses_sha256(clone: Clone) -> bool:
    done = _run(["git", "rev-parse", "--show-object-format"], clone.root, _callers(os.environ))
    return done.stdout.strip() == b"sha256"


def check_out(clone: Clone, commit: str, folder: Path, tags: Iterable[str]) -> None:
    """Checks out the commit in a new repository with these tags at it. No hook or filter of the clone's runs."""
    borrow_objects(clone, folder)
    environment = neutral_environment(os.environ)
    for command in (
        ["git", "update-ref", "--no-deref", "HEAD", commit],
        ["git", "reset", "--quiet", "--hard"],
        *(["git", "update-ref", f"refs/tags/{tag}", commit] for tag in tags),
    ):
        done = _run(command, folder, environment)
        if done.returncode != 0:
            msg = f"git cannot check out {commit[:12]}: {done.stderr.decode(errors='replace').strip()}"
            raise VerifyError(msg)
