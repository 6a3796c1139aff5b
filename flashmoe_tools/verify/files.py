"""Compares every file that the commit determines with the wheel, and checks that the wheel has no others."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from flashmoe_tools import links, sbom
from flashmoe_tools.audit.errors import AuditError
from flashmoe_tools.audit.guard import parse_json
from flashmoe_tools.report import Check, Verdict
from flashmoe_tools.tables import ARCH, KERNELS, OPERATIONS
from flashmoe_tools.verify import metadata
from flashmoe_tools.verify.content import LIBRARY, PACKAGE, RECORD, Content
from flashmoe_tools.verify.errors import VerifyError
from flashmoe_tools.verify.repository import Commit, Objects
from flashmoe_tools.versions import stated_version, version_of, with_version

README = "README.md"
LINKS = "flashmoe_tools/links.py"  # creates the long description from README.md in a build
BILL = "flashmoe_tools/sbom.py"  # creates the bill of materials from provenance.json
VERSION_FILE = f"{PACKAGE}/_version.py"
FLOOR = "manylinux_2_28"
BUILT = (LIBRARY, RECORD)  # by compilers: only a rebuild compares them
GENERATED = ("METADATA", "WHEEL", "RECORD", "entry_points.txt")  # by the packer, in .dist-info
SHOWN = 8


@dataclass(frozen=True)
class Expected:
    """What the commit determines: version, distribution, and the content of files by their names in the wheel."""

    distribution: str
    version: str
    files: Mapping[str, bytes]
    headers: str  # of METADATA
    description: str
    is_description_sure: bool  # False: the commit's rule for it is not ours
    is_bill_sure: bool  # False: the commit's rule for it is not ours
    entry_points: str  # the file's text, empty if there is none
    hatchling: str  # the version that the commit's lock pins

    @property
    def info(self) -> str:
        return f"{self.distribution}-{self.version}.dist-info"


def expected_content(objects: Objects, commit: Commit, tags: frozenset[str], partial: str = "") -> Expected:
    """Reads it from the clone's objects. Raises VerifyError if the commit is not one of flashmoe's.

    ``partial``: as in versions.py.
    """
    sources = {f"{PACKAGE}/_tables/{path.removeprefix('csrc/')}": path for path in commit.tree if _is_table(path)}
    needed = ["pyproject.toml", VERSION_FILE]
    missing = [path for path in needed if path not in commit.tree]
    if missing:
        msg = f"commit {commit.digest[:12]} has no {missing[0]}, so it is not a commit of flashmoe"
        raise VerifyError(msg)
    pyproject = _read(objects, commit, "pyproject.toml")
    project = metadata.read_project(pyproject)
    sources |= {path: path for path in metadata.wheel_sources(pyproject, commit.tree)}
    licenses = metadata.license_files(project, commit.tree)
    blobs = objects.read([commit.tree[path] for path in sources.values()])
    files = {name: blobs[commit.tree[path]] for name, path in sources.items()}
    base = stated_version(files[VERSION_FILE].decode("utf-8", "replace"))
    description, is_sure = _description(objects, commit, project, base)
    version = version_of(base, commit.digest, dirty=False, tags=tags, partial=partial)
    files[VERSION_FILE] = with_version(files[VERSION_FILE].decode("utf-8", "replace"), version).encode()
    expected = Expected(
        distribution=metadata.normalized(project["name"]),
        version=version,
        files=files,
        headers=metadata.metadata_headers(project, version, licenses, metadata.core_version(pyproject)),
        description=description,
        is_description_sure=is_sure,
        is_bill_sure=_is_ours(objects, commit, BILL, sbom.__file__),
        entry_points=metadata.entry_points_text(project),
        hatchling=metadata.pinned(_read(objects, commit, "lockfiles/build.txt").decode("utf-8", "replace")).get(
            "hatchling", ""
        ),
    )
    for path in licenses:
        files[f"{expected.info}/licenses/{path}"] = _read(objects, commit, path)
    return expected


def _description(objects: Objects, commit: Commit, project: Mapping[str, Any], version: str) -> tuple[str, bool]:
    """The long description, and whether the commit creates it like this code.

    It is README.md if the project names that; otherwise README.md with its links rewritten by a module that must be the
    same as ours.
    """
    named = project.get("readme")
    text = _read(objects, commit, named if isinstance(named, str) else README).decode("utf-8", "replace")
    if isinstance(named, str):
        return text, True
    made = links.long_description(text, version, project.get("urls", {}).get("Source", ""))
    return made, _is_ours(objects, commit, LINKS, links.__file__)


def _is_ours(objects: Objects, commit: Commit, path: str, own: str) -> bool:
    """Whether the commit's module is identical to the one that runs here."""
    return path in commit.tree and _read(objects, commit, path) == Path(own).read_bytes()


def _is_table(path: str) -> bool:
    place = PurePosixPath(path)
    return path == f"csrc/{ARCH}" or (
        len(place.parts) == 3 and place.parts[0] == "csrc" and place.name in (OPERATIONS, KERNELS)
    )


def _read(objects: Objects, commit: Commit, path: str) -> bytes:
    if path not in commit.tree:
        msg = f"commit {commit.digest[:12]} has no {path}, which its pyproject.toml names"
        raise VerifyError(msg)
    digest = commit.tree[path]
    return objects.read([digest])[digest]


def wheel_tag(content: Content) -> str:
    """The wheel tag of a build for the library's machine."""
    return f"py3-none-{FLOOR}_{content.machine}"


def compare_files(content: Content, expected: Expected) -> list[Check]:
    """One check each for the wheel's file name, its files, the generated metadata and the bill of materials."""
    return [
        _check_name(content, expected),
        _check_files(content, expected),
        _check_metadata(content, expected),
        _check_bill(content, expected),
    ]


def _check_name(content: Content, expected: Expected) -> Check:
    stem = content.wheel.path.name.removesuffix(".whl")
    wanted = f"{expected.distribution}-{expected.version}-{wheel_tag(content)}"
    if stem == wanted and content.stated.version == expected.version:
        return Check("name and version", Verdict.PASS, f"{expected.distribution} {expected.version}")
    found = f"{content.wheel.path.name}, which states version {content.stated.version}"
    why = "A release's version needs the release's tag at the commit; any other build carries a development version."
    step = "git fetch --tags, if the release is newer than the clone; else do not install this file"
    return Check("name and version", Verdict.FAIL, found, f"{wanted}.whl", why, step)


def _check_files(content: Content, expected: Expected) -> Check:
    generated = {f"{expected.info}/{name}" for name in (*GENERATED, f"sboms/{sbom.NAME}")}
    if not expected.entry_points:
        generated.remove(f"{expected.info}/entry_points.txt")
    names = set(content.wheel.names)
    foreign = sorted(names - {*expected.files, *generated, *BUILT})
    missing = sorted({*expected.files, *generated, *BUILT} - names)
    edited = sorted(name for name in expected.files if name in names and content.read(name) != expected.files[name])
    parts = (("not made by a build of the commit", foreign), ("missing", missing), ("differs", edited))
    wrong = [f"{word}: {_listed(found)}" for word, found in parts if found]
    if wrong:
        return Check(
            "files", Verdict.FAIL, "; ".join(wrong), f"what commit {content.stated.commit[:12]} holds, and nothing else",
            "Python runs these files as they lie in the wheel.", "do not install this file; build the commit yourself",
        )  # fmt: skip
    return Check("files", Verdict.PASS, f"{len(expected.files)} are those of the commit, and there is no other")


def _check_metadata(content: Content, expected: Expected) -> Check:
    """Compares each generated file of .dist-info byte for byte, because an installer may read what our parser ignores."""
    held = {
        name: content.read(f"{expected.info}/{name}")
        for name in GENERATED
        if f"{expected.info}/{name}" in content.wheel.names
    }
    texts = {name: data.decode("utf-8", "replace") for name, data in held.items()}
    headers, _, description = texts.get("METADATA", "").partition("\n\n")
    wrong = [f"METADATA {name}" for name in metadata.differing_headers(f"{headers}\n", expected.headers)]
    is_described = description == expected.description
    if not is_described and expected.is_description_sure:
        wrong.append("METADATA description")
    wheel = metadata.wheel_text(wheel_tag(content), expected.hatchling)
    wrong += [f"WHEEL {name}" for name in metadata.differing_headers(texts.get("WHEEL", ""), wheel)]
    if texts.get("entry_points.txt", "") != expected.entry_points:
        wrong.append("entry_points.txt")
    record = f"{expected.info}/RECORD"
    rows = [
        (name, content.wheel.digests[name], content.wheel.sizes[name]) for name in content.wheel.names if name != record
    ]
    if texts.get("RECORD", "") != metadata.record_text(rows, record):
        wrong.append("RECORD")
    if wrong:
        why = "pip installs what METADATA requires, and makes commands of the entry points."
        step = "do not install this file; build the commit yourself"
        return Check("metadata", Verdict.FAIL, _listed(wrong), "what a build of the commit writes", why, step)
    if not is_described:
        why = f"The commit makes it by another {LINKS} than this verifier's, so its text can be neither proved nor refuted here."
        step = "verify with the flashmoe of that commit"
        return Check(
            "metadata", Verdict.UNPROVED, "the long description is not README.md with our links", "the same", why, step
        )
    return Check("metadata", Verdict.PASS, f"{', '.join(texts)} are what a build of the commit writes")


def _check_bill(content: Content, expected: Expected) -> Check:
    names = [name for name in content.wheel.names if name.endswith(f".dist-info/sboms/{sbom.NAME}")]
    try:
        (name,) = names
        is_right = parse_json(content.read(name), name) == sbom.bill(content.stated.record)
    except (AuditError, KeyError, ValueError, TypeError):
        is_right = False
    if is_right:
        return Check("bill of materials", Verdict.PASS, "says what provenance.json says")
    found, wanted = f"{sbom.NAME} is not what a build makes of provenance.json", "the same"
    if expected.is_bill_sure:
        why, step = "Scanners take it for what is inside.", "do not install this file; build the commit yourself"
        return Check("bill of materials", Verdict.FAIL, found, wanted, why, step)
    why = f"The commit makes it by another {BILL} than this verifier's, so it can be neither proved nor refuted here."
    return Check("bill of materials", Verdict.UNPROVED, found, wanted, why, "verify with the flashmoe of that commit")


def _listed(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def printable(text: str) -> str:
    """A name from an untrusted file on one line: it may hold line breaks and escape sequences."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
