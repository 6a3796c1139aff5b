"""The provenance of published files in the format that other tools read: an in-toto statement with SLSA's predicate.

``python -m flashmoe_build.release.statement`` writes build/provenance.intoto.json for everything in dist/. Dependencies are listed
with the hashes of the lock and without an address: where a file was fetched from says nothing about what it is.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmoe.errors import BuildError, ExitCode
from flashmoe_build.compile.toolchain import PLATFORMS
from flashmoe_build.environments.lock import Pin, read_lock
from flashmoe_build.program import ROOT, ending
from flashmoe_tools.report import write_json

NAME = "provenance.intoto.json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"  # names fixed by the formats; nothing is fetched from them
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:flashmoe:build:1"
BUILDER = "urn:flashmoe:builder:unattested"  # an attesting builder would name itself; this is the build's own statement


def statement(record: Mapping[str, Any], subjects: Iterable[Path], pins: Iterable[Pin]) -> dict[str, Any]:
    """The statement about these files. ``record`` is flashmoe/provenance.json, ``pins`` those of the lock that it names."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": [_descriptor(path.name, sha256=_sha256(path)) for path in sorted(subjects)],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"targets": list(record["targets"]), "version": record["version"]},
                "internalParameters": {
                    "sourceDateEpoch": record["source_date_epoch"],
                    "hostCompiler": record["compilers"]["cxx"],
                    "uncommittedChanges": record["dirty"],
                },
                "resolvedDependencies": dependencies(record, pins),
            },
            "runDetails": {
                "builder": {"id": BUILDER},
                "byproducts": [
                    _descriptor("flashmoe/libflashmoe.so", sha256=record["extension_sha256"]),
                    *(
                        _descriptor(f"{row['name']}.{row['target']}", sha256=row["sha256"])
                        for row in record["binaries"]
                    ),
                ],
            },
        },
    }


def dependencies(record: Mapping[str, Any], pins: Iterable[Pin]) -> list[dict[str, Any]]:
    """The sources, the lock, and one entry per hash that the lock allows, including the device compilers."""
    found = [
        _descriptor("sources", gitCommit=record["commit"]),
        _descriptor("lockfiles/build.txt", sha256=record["locks"]["build.txt"]),
    ]
    for pin in pins:
        hashes = sorted(digest.removeprefix("sha256:") for digest in pin.hashes)
        found += [_descriptor(f"{pin.name}=={pin.version}", sha256=digest) for digest in hashes]
    return found


def _descriptor(name: str, **digest: str) -> dict[str, Any]:
    return {"name": name, "digest": digest}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_statement(dist: Path, out: Path, root: Path = ROOT) -> Path:
    """Write the statement about every wheel and sdist in ``dist``. Raises BuildError if there are none, or no record of a build."""
    subjects = [*dist.glob("*.whl"), *dist.glob("*.tar.gz")]
    if not subjects:
        msg = f"{dist.name} contains no wheel and no sdist; ./nox -s build makes the wheel"
        raise BuildError(msg)
    try:
        record = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"{out.name}/provenance.json cannot be read; ./nox -s build writes it"
        raise BuildError(msg) from error
    lock = root / "lockfiles" / "build.txt"
    if _sha256(lock) != record["locks"]["build.txt"]:
        msg = "lockfiles/build.txt is not the one of the last build; ./nox -s build, then again"
        raise BuildError(msg)
    write_json(out / NAME, statement(record, subjects, read_lock(lock)))
    return out / NAME


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_build.release.statement", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of what is published (default: dist)")
    options = parser.parse_args(arguments)

    def write() -> int:
        print(f"statement  {write_statement(options.dist, ROOT / 'build').name}")
        for other in PLATFORMS:  # builds for another machine have separate records
            if any((options.dist / other).glob("*.whl")):
                print(f"statement  {other}/{write_statement(options.dist / other, ROOT / 'build' / other).name}")
        return ExitCode.OK

    return ending(write)


if __name__ == "__main__":
    raise SystemExit(main())
