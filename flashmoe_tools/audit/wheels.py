"""Checks on a wheel as a whole: whether its tag, RECORD and provenance match its content."""

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import Any

from flashmoe.errors import TableError
from flashmoe_tools.audit.context import failed, limited, listing, passed, warned
from flashmoe_tools.audit.elf import ElfFacts
from flashmoe_tools.audit.embedded import Binary
from flashmoe_tools.audit.errors import AuditError
from flashmoe_tools.audit.guard import guarded, parse_json
from flashmoe_tools.audit.inputs import Wheel
from flashmoe_tools.fields import Fields
from flashmoe_tools.report import Check
from flashmoe_tools.tables import Tables, load_tables, table_directory, table_files

# Libraries that torch or the driver provides: no wheel may bundle them, and no platform tag covers them.
OUTSIDE = (
    "libtorch*.so*",
    "libc10*.so*",
    "libcud*.so*",
    "libnv*.so*",
    "libcublas*.so*",
    "libnccl*.so*",
    "libcusparse*.so*",
)
_LEGACY = {"manylinux1": "manylinux_2_5", "manylinux2010": "manylinux_2_12", "manylinux2014": "manylinux_2_17"}
_SCHEME = re.compile(r"[^/]+\.data/(?:purelib|platlib|headers|scripts|data)/.")
_PYTHON_API = re.compile(r"_?Py[A-Z_]\w*")


def check_wheel(wheel: Wheel, facts: Mapping[str, ElfFacts]) -> list[Check]:
    """The checks that need only the wheel; ``facts`` by member name."""
    return [
        *guarded("WHEEL", lambda: [*check_tag(wheel, facts), *check_versions(wheel), *check_places(wheel)]),
        *check_auditwheel(wheel, facts),
        *guarded("RECORD", lambda: check_record(wheel)),
    ]


def check_tag(wheel: Wheel, facts: Mapping[str, ElfFacts]) -> list[Check]:
    """Compares the tags in the file name, the tags in the WHEEL file, and the tags that the content allows."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    name, checks = "wheel tag", []
    header = Parser().parsestr(wheel.metadata["WHEEL"])
    try:
        in_name = {str(tag) for tag in parse_wheel_filename(wheel.path.name)[3]}
    except InvalidWheelFilename as error:
        return [
            failed(
                name,
                found=wheel.path.name,
                expected="name-version-python-abi-platform.whl",
                why="pip refuses it.",
                cause=str(error),
                next_step="keep the file name that the builder chose",
            )
        ]
    stated = {tag.strip() for line in header.get_all("Tag", []) for tag in _expand(line)}
    if in_name != stated:
        checks.append(
            failed(
                name,
                found=f"file name: {listing(sorted(in_name), 4)}; WHEEL: {listing(sorted(stated), 4)}",
                expected="the same tags in both",
                why="Installers decide by one, tools by the other.",
                cause="renamed after the build, or a hook that set only one of them",
                next_step="let the builder write both (`wheel tags` renames properly)",
            )
        )
    platforms = sorted({tag.rsplit("-", 1)[1] for tag in in_name})
    if "any" in platforms:
        checks.append(
            failed(
                name,
                found=f"{listing(platforms)}, Root-Is-Purelib {header.get('Root-Is-Purelib')}",
                expected="a Linux platform tag, Root-Is-Purelib false",
                why="pip would install machine code on any platform.",
                cause="the builder took it for a pure Python wheel",
                next_step="set the tag and pure_python = false in the build hook",
            )
        )
    elif header.get("Root-Is-Purelib", "").lower() == "true":
        why = "The tag keeps it to its platform, but pip unpacks it into the folder for pure Python, which differs where lib64 is used."
        step = "set pure_python = false in the build hook"
        checks.append(warned(f"{name}: Root-Is-Purelib", f"true, with {listing(platforms)}", "false", why, step))
    strangers = [m for m, f in facts.items() if not any(p == "any" or p.endswith(f.machine) for p in platforms)]
    if strangers:
        checks.append(
            failed(
                name,
                found=f"{listing(platforms)}, but {listing(strangers)} is for {facts[strangers[0]].machine}",
                expected="a tag that names the machine of the content",
                why="pip installs it on machines that cannot load it.",
                cause="a wheel of another build's library, or renamed",
                next_step="build it with the platform that the tag names (`-- --platform`)",
            )
        )
    users = {s.name for f in facts.values() for s in f.undefined if _PYTHON_API.fullmatch(s.name)}
    if any(tag.startswith("py3-none-") for tag in in_name) and users:
        checks.append(
            failed(
                name,
                found=f"py3-none, but it uses {listing(sorted(users), 4)}",
                expected="no symbol of the Python C API under py3-none",
                why="It works only with the Python that it was built for.",
                cause="a Python extension module under a tag for all Pythons",
                next_step="tag it cp3XX (or abi3), or drop the Python C API",
            )
        )
    return checks or [
        passed(name, listing(sorted(in_name)), "the same in file name and metadata, and they match the content")
    ]


def check_versions(wheel: Wheel) -> list[Check]:
    """Checks the wheel format version: pip reads major 1 and warns about an unknown minor."""
    stated = [value.strip() for value in Parser().parsestr(wheel.metadata["WHEEL"]).get_all("Wheel-Version", [])]
    if stated == ["1.0"]:
        return []
    name, found, step = "wheel version", listing(stated) or "no Wheel-Version", "build it with a wheel builder"
    if len(stated) == 1 and re.fullmatch(r"1\.\d+", stated[0]):
        return [warned(name, found, "1.0", "pip warns of a format that is newer than it knows.", step)]
    why = "pip refuses a wheel of another major version, or of none."
    return [
        failed(name, found=found, expected="1.0", why=why, cause="edited, or not written by a builder", next_step=step)
    ]


def installed_name(member: str) -> str:
    """Where pip puts a member, relative to site-packages; the folders of ``NAME.data`` are spread over the environment."""
    data = re.fullmatch(
        r"[^/]+\.data/(purelib|platlib|data/lib(?:64)?/python3[.\d]*/(?:site|dist)-packages)/(.+)", member
    )
    return data[2] if data else member


def check_places(wheel: Wheel) -> list[Check]:
    """Checks that each member has its own path after installation."""
    places: dict[str, list[str]] = {}
    for member in wheel.names:
        places.setdefault(installed_name(member), []).append(member)
    lost = [name for name in wheel.names if re.match(r"[^/]+\.data/", name) and not _SCHEME.match(name)]
    unknown = failed(
        "data folder",
        found=listing(lost, 4),
        expected="NAME.data/ with purelib, platlib, headers, scripts or data, and files in them",
        why="pip refuses the wheel.",
        cause="packed by hand",
        next_step="build it with a wheel builder",
    )
    return [unknown] * bool(lost) + limited(
        [
            failed(
                f"installed twice: {place}",
                found=listing(members, 4),
                expected="one member for each installed file",
                why="pip installs the .data folder last, over what was checked.",
                cause="a file in the .data folder with the name of another",
                next_step="leave one of them out",
            )
            for place, members in places.items()
            if len(members) > 1
        ]
    )


def _expand(line: str) -> list[str]:
    python, abi, platform = [*line.strip().split("-"), "", ""][:3]
    return [f"{p}-{a}-{x}" for p in python.split(".") for a in abi.split(".") for x in platform.split(".")]


def _glibc(platform: str) -> tuple[int, int] | None:
    """The glibc that a platform tag promises, such as (2, 28); None for a tag that promises none."""
    family, _, rest = platform.partition("_")
    match = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", f"{_LEGACY[family]}_{rest}" if family in _LEGACY else platform)
    return (int(match[1]), int(match[2])) if match is not None else None


def check_auditwheel(wheel: Wheel, facts: Mapping[str, ElfFacts]) -> list[Check]:
    """auditwheel's own verdict on the platform tag, from its Python API."""
    name = "auditwheel"
    machine = next((f.machine for f in facts.values()), "x86_64")
    try:
        from auditwheel.architecture import Architecture
        from auditwheel.libc import Libc
        from auditwheel.wheel_abi import analyze_wheel_abi
    except ImportError:
        return [
            failed(
                name,
                found="auditwheel is not installed",
                expected="its verdict on the platform tag",
                why="The tag was not confirmed by a second tool.",
                next_step="pip install 'flashmoe-kernels[tools]'; in a clone `./nox -s symbols`",
            )
        ]
    own = {PurePosixPath(member).name for member in wheel.extensions}  # the package loads these itself
    try:
        result = analyze_wheel_abi(
            Libc.GLIBC,
            Architecture(machine),
            wheel.path,
            frozenset({*OUTSIDE, *own}),
            disable_isa_ext_check=False,
            allow_graft=False,
        )
    except Exception as error:  # auditwheel raises plain Exceptions of many kinds; each means that it gave no verdict
        return [
            failed(
                name,
                found=f"{type(error).__name__}: {error}",
                expected="its verdict on the platform tag",
                why="The tag was not confirmed by a second tool.",
                cause="auditwheel cannot read the wheel",
                next_step="run `auditwheel show` on it",
            )
        ]
    policy = result.overall_policy
    allowed = {policy.name, *policy.aliases}
    reached = _glibc(policy.name)
    tags = sorted(set(wheel.path.stem.split("-")[-1].split(".")))
    for tag in tags:
        stated = _glibc(tag)
        above = stated is not None and (reached is None or stated < reached)
        if above or (stated is None and tag not in allowed and not tag.startswith("linux_")):
            why_not = {
                lib for p, ref in result.external_refs.items() if stated is not None and p == tag for lib in ref.libs
            }
            return [
                failed(
                    name,
                    found=f"the content is {policy.name}"
                    + (f"; outside {tag}: {listing(sorted(why_not))}" if why_not else ""),
                    expected=f"{tag}, as the file name says",
                    why="pip installs it on systems where it cannot be loaded.",
                    cause="newer symbol versions, or libraries that are not on the platform's list",
                    next_step="build in the pinned image, or `auditwheel repair`",
                )
            ]
    return [passed(name, f"the content is {policy.name}", f"the tag says {listing(tags)}")]


def check_record(wheel: Wheel) -> list[Check]:
    """Checks RECORD: sha256 and size of every member, no unlisted member, no line that installers read differently."""
    name = "wheel record"
    lines = [row for row in csv.reader(wheel.metadata["RECORD"].splitlines()) if row]
    rows = {row[0]: row[1] for row in lines if len(row) == 3}
    sizes = {row[0]: row[2] for row in lines if len(row) == 3}
    wrong = [f"{','.join(row)} (not path, hash and size)" for row in lines if len(row) != 3]
    wrong += [f"{member} ({count} lines)" for member, count in Counter(row[0] for row in lines).items() if count > 1]
    for member in wheel.names:
        stated = rows.get(member)
        if stated is None:
            wrong.append(f"{member} (not in RECORD)")
        elif stated.startswith("sha256="):
            if stated != f"sha256={wheel.digests[member]}":
                wrong.append(member)
        elif PurePosixPath(member).name not in ("RECORD", "RECORD.jws", "RECORD.p7s"):
            wrong.append(f"{member} (no sha256)")
        if sizes.get(member, "") not in ("", str(wheel.sizes[member])):
            wrong.append(f"{member} ({sizes[member]} bytes stated, {wheel.sizes[member]} held)")
    wrong += [f"{member} (missing)" for member in rows if member not in wheel.names]
    if wrong:
        return [
            failed(
                name,
                found=f"differs: {listing(wrong)}",
                expected="sha256 and size of every member as RECORD says",
                why="The content is not what the builder packed.",
                cause="a member was changed, added or removed after the build",
                next_step="build the wheel again",
            )
        ]
    return [passed(name, f"{len(rows)} members, every sha256 matches")]


def check_tables(wheel: Wheel, expected: Tables) -> list[Check]:
    """Compares the tables in our wheel with those that its kernels are audited against."""
    name, folder = "tables", wheel.root / "flashmoe" / "_tables"
    members = [member for member in wheel.other if member.startswith("flashmoe/_tables/")]
    ours = [path.relative_to(table_directory()).as_posix() for path in table_files(table_directory())]
    why = "The package reads its limits, shapes and docs from them; the kernels were compiled from them."
    again = "rebuild the wheel from this checkout, or audit it with the flashmoe that built it"
    try:
        for member in members:
            (wheel.root / member).parent.mkdir(parents=True, exist_ok=True)
            (wheel.root / member).write_bytes(wheel.other[member])
        held = load_tables(folder)
    except TableError as error:
        cause = "left out of the wheel, or edited"
        return [failed(name, found=str(error), expected=listing(ours), why=why, cause=cause, next_step=again)]
    if held == expected:
        return [passed(name, f"{len(held.kernels)} rows, {len(held.targets)} targets, equal to those audited against")]
    rows = len(set(map(repr, held.kernels)) ^ set(map(repr, expected.kernels)))
    return [
        failed(
            name,
            found=f"other tables: {rows} kernel rows differ",
            expected="the tables of the auditing flashmoe",
            why=why,
            cause="the wheel was built from other sources",
            next_step=again,
        )
    ]


def read_provenance(content: bytes) -> dict[str, Any] | None:
    """The provenance record, or None if it is not one of ours or a field has another type."""
    try:
        payload = parse_json(content, "provenance.json")
        record = Fields(payload, "provenance.json")
        is_ours = record.take("schema", str) == "flashmoe.provenance/1"
        record.take("extension_sha256", str)
        record.words("targets", default=())
        for row in record.take("binaries", list, []):
            binary = Fields(row, "provenance.json, binaries")
            for key in ("name", "target", "sha256"):
                binary.take(key, str)
    except (AuditError, TableError):
        return None
    return dict(payload) if is_ours else None


def check_provenance(record: Mapping[str, Any] | None, library: Path, binaries: Sequence[Binary]) -> list[Check]:
    """Compares the library and each embedded binary with provenance.json."""
    name, again = "provenance", "build again; do not edit what was built"
    if record is None:
        return [
            failed(
                name,
                found="no readable provenance.json",
                expected="flashmoe.provenance/1",
                why="It is unknown which sources and compilers this came from.",
                cause="not written by our build, or left out of the wheel",
                next_step="build it with `python -m flashmoe_build`",
            )
        ]
    checks = []
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    if record.get("extension_sha256") != digest:
        checks.append(
            failed(
                name,
                found=f"sha256 {digest[:16]}...",
                expected=f"sha256 {str(record.get('extension_sha256'))[:16]}... ({library.name})",
                why="The library is not the one that was built.",
                cause="relinked, stripped or edited after provenance.json was written",
                next_step=again,
            )
        )
    stated = {(row["name"], row["target"]): row for row in record.get("binaries", [])}
    held = {(b.name, b.target): b for b in binaries}
    claimed, built = sorted(record.get("targets", ())), sorted({b.target for b in binaries})
    if claimed != built or len(stated) != len(record.get("binaries", [])):
        checks.append(
            failed(
                f"{name}: targets",
                found=f"{listing(claimed) or 'none'} stated, in {len(record.get('binaries', []))} lines",
                expected=f"{listing(built) or 'none'}, as embedded, in {len(held)} lines",
                why="A rebuild and the audit's table take the targets from here.",
                cause="edited after the build",
                next_step=again,
            )
        )
    for key in sorted(stated.keys() | held.keys()):
        label = ".".join(key)
        if key not in held:
            checks.append(
                failed(
                    f"{name}: {label}",
                    found="not embedded",
                    expected=f"sha256 {stated[key]['sha256'][:16]}...",
                    why="The record lists a kernel that is not there.",
                    cause="dropped by the linker",
                    next_step=again,
                )
            )
        elif key not in stated:
            checks.append(
                failed(
                    f"{name}: {label}",
                    found="embedded",
                    expected="a line in provenance.json",
                    why="It is unknown where this kernel came from.",
                    cause="added after the build",
                    next_step=again,
                )
            )
        elif _described(stated[key]) != {"size": held[key].size, "entries": list(held[key].entries)}:
            checks.append(
                failed(
                    f"{name}: {label}",
                    found=f"{_described(stated[key])!r:.300}",
                    expected=f"{held[key].size} bytes, entries {listing(held[key].entries)}",
                    why="The record describes another binary than the embedded one.",
                    cause="edited after the build",
                    next_step=again,
                )
            )
        elif stated[key]["sha256"] != held[key].actual_sha256:
            checks.append(
                failed(
                    f"{name}: {label}",
                    found=f"sha256 {held[key].actual_sha256[:16]}...",
                    expected=f"sha256 {stated[key]['sha256'][:16]}... (provenance.json)",
                    why="It is not what the compiler produced, so no test of that binary applies to this one.",
                    cause="edited after the build, index included",
                    next_step=again,
                )
            )
    return limited(checks) or [
        passed(name, f"library and {len(stated)} binaries are those of commit {str(record.get('commit'))[:12]}")
    ]


def _described(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row of provenance.json says about its binary besides name, target and sha256."""
    return {key: value for key, value in row.items() if key not in ("name", "target", "sha256")}
