"""The commit and the version of this build, and the check that a release's tag matches the version.

    python -m flashmoe_build.release.version                # prints the version that a build of this checkout carries
    python -m flashmoe_build.release.version --tag v0.1.0   # exit 1 unless that is the release of this clean commit

hatch_build.py passes project_version() to hatchling, so every way of building a wheel or an sdist gives the same version.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flashmoe.errors import BuildError, ExitCode
from flashmoe_build.compile.archs import requested, resolve
from flashmoe_build.program import ROOT, ending
from flashmoe_tools.tables import load_tables
from flashmoe_tools.versions import partial_label, release_tag, stated_version, version_of

COMMIT_FILE = "COMMIT.json"  # in an sdist, which has no repository
UNKNOWN_EPOCH = 315532800  # 1980-01-01, the earliest time that a zip can hold
VERSION_FILE = Path("flashmoe") / "_version.py"


@dataclass(frozen=True)
class Commit:
    """The sources' commit; ``dirty`` if tracked files differ from it or untracked ones could affect the build."""

    commit: str
    dirty: bool
    source_date_epoch: int
    tags: tuple[str, ...] = ()  # tags of this commit


def find_commit(root: Path) -> Commit:
    """The commit from git, else from the sdist's record, else unknown and dirty."""
    head = _git(root, "rev-parse", "HEAD")
    if head is not None and _git(root, "rev-parse", "--show-prefix") == "":
        status = _git(root, "status", "--porcelain", "--untracked-files=normal")
        epoch = _git(root, "log", "-1", "--format=%ct")
        listed = (_git(root, "tag", "--points-at", head) or "").split()
        tags = tuple(tag for tag in listed if tag.startswith("v"))  # other tags must not affect an sdist's bytes
        return Commit(head, dirty=bool(status), source_date_epoch=int(epoch or UNKNOWN_EPOCH), tags=tags)
    try:
        record = json.loads((root / COMMIT_FILE).read_text(encoding="utf-8"))
        return Commit(**{**record, "tags": tuple(record.get("tags", ()))})
    except (OSError, ValueError, TypeError, AttributeError):
        return Commit("unknown", dirty=True, source_date_epoch=int(os.environ.get("SOURCE_DATE_EPOCH", UNKNOWN_EPOCH)))


def commit_json(commit: Commit) -> str:
    return json.dumps(asdict(commit), indent=1) + "\n"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", *arguments],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def base_version(root: Path = ROOT) -> str:
    """The version in flashmoe/_version.py. Raises BuildError if there is none."""
    base = stated_version((root / VERSION_FILE).read_text(encoding="utf-8"))
    if not base:
        msg = f'{VERSION_FILE} has no line __version__ = "..."; restore it'
        raise BuildError(msg)
    return base


def project_version(root: Path = ROOT, archs: str | None = None) -> str:
    """The version that a build of ``root`` has now, for the targets that ``archs`` or the environment requests."""
    commit = find_commit(root)
    partial = _partial(root, requested(os.environ, archs))
    return version_of(base_version(root), commit.commit, dirty=commit.dirty, tags=commit.tags, partial=partial)


def _partial(root: Path, request: str) -> str:
    if request == "all":  # its wheel has the plain name, also on a machine without GPUs; no table is read
        return ""
    tables = load_tables(root / "csrc")
    targets = resolve(request, tables)
    return "" if targets == tables.targets else partial_label([target.name for target in targets])


def check_release(tag: str, root: Path = ROOT) -> str:
    """The version of the release ``tag``. Raises BuildError unless the tag matches the version and is on this clean commit."""
    base, found = base_version(root), project_version(root)
    if tag != release_tag(base):
        msg = f"the tag {tag!r} is not the version: {VERSION_FILE} says {base}, whose tag is {release_tag(base)}; correct one of them"
        raise BuildError(msg)
    if found != base:
        msg = f"a build of this checkout is {found}, not {base}: a release needs a clean checkout of the commit tagged {tag}"
        raise BuildError(msg)
    return base


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_build.release.version", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tag", help="the release's tag: exit 1 unless it is the version")
    options = parser.parse_args(arguments)

    def show() -> int:
        print(check_release(options.tag) if options.tag else project_version())
        return ExitCode.OK

    return ending(show)


if __name__ == "__main__":
    raise SystemExit(main())
