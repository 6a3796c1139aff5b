"""What lockfiles/*.txt pin, and whether an environment matches them.

A lock file is a requirement file in which every line is ``name==version ; marker --hash=sha256:...``. The hashes are
checked by the installer (:mod:`flashmoe_build.environments.environment`); this module checks what the installer cannot: that the
file pins everything that its ``.in`` file requires and names no registry, and that the packages found at build time are
the pinned ones, each installed once.

    python -m flashmoe_build.environments.lock lockfiles/build.txt      # is this interpreter's environment the locked one?
"""

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from packaging.markers import Marker, default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from flashmoe._version import DISTRIBUTION
from flashmoe.errors import LockError

HASH = re.compile(r"--hash[= ](?P<hash>\S+)")
SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
COMMENT = re.compile(r"(^|\s+)#.*$")
INPUT_DIGEST = re.compile(r"^# inputs sha256:([0-9a-f]{64})$", re.MULTILINE)
REWRITE = "run `nox -s lock` to rewrite it"


@dataclass(frozen=True)
class Pin:
    """One line of a lock file."""

    name: str  # canonical
    version: str
    marker: Marker | None
    hashes: tuple[str, ...]

    def applies(self, environment: Mapping[str, str]) -> bool:
        return self.marker is None or self.marker.evaluate(dict(environment))


@dataclass(frozen=True)
class Wanted:
    """One requirement of a ``.in`` file."""

    requirement: Requirement
    origin: str  # file name

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)


def logical_lines(text: str) -> list[str]:
    """Lines with continuations joined and comments and blanks dropped."""
    joined = re.sub(r"\\\n", " ", "\n".join(COMMENT.sub("", line) for line in text.splitlines()))
    return [line.strip() for line in joined.splitlines() if line.strip()]


def parse_lock(text: str, origin: str) -> tuple[Pin, ...]:
    """Pins of a lock file's text. Raises LockError for a line that is not pinned and hashed."""
    pins = tuple(_parse_pin(line, origin) for line in logical_lines(text))
    if not pins:
        msg = f"{origin} pins nothing; {REWRITE}"
        raise LockError(msg)
    return pins


def _parse_pin(line: str, origin: str) -> Pin:
    if line.startswith("-"):
        msg = f"{origin}: option {line.split()[0]!r}; a lock holds only pins, no registry and no other file; {REWRITE}"
        raise LockError(msg)
    hashes = tuple(match["hash"] for match in HASH.finditer(line))
    requirement = _requirement(HASH.sub("", line).strip(), origin)
    pinned = [spec.version for spec in requirement.specifier if spec.operator in ("==", "===")]
    if len(requirement.specifier) != 1 or len(pinned) != 1 or requirement.url or "*" in pinned[0]:
        msg = f"{origin}: {requirement.name} is not pinned to one version ({str(requirement)!r}); {REWRITE}"
        raise LockError(msg)
    wrong = [value for value in hashes if not SHA256.fullmatch(value)]
    if wrong or not hashes:
        found = f"has the malformed hash {wrong[0]!r}" if wrong else "has no hash"
        msg = f"{origin}: {requirement.name}=={pinned[0]} {found}; {REWRITE}"
        raise LockError(msg)
    return Pin(canonicalize_name(requirement.name), pinned[0], requirement.marker, hashes)


def _requirement(text: str, origin: str) -> Requirement:
    try:
        return Requirement(text)
    except InvalidRequirement as error:
        msg = f"{origin}: cannot read {text!r}: {error}"
        raise LockError(msg) from error


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        msg = f"cannot read {path.name} in {path.parent.name}/: {error.strerror}; restore it from git"
        raise LockError(msg) from error


def read_lock(path: Path) -> tuple[Pin, ...]:
    return parse_lock(read_text(path), path.name)


def input_files(path: Path) -> tuple[Path, ...]:
    """A ``.in`` file and the files it includes with ``-r``, each once, in reading order."""
    found = [path]
    for line in logical_lines(read_text(path)):
        if line.startswith("-r"):
            found += [child for child in input_files(path.parent / line[2:].strip()) if child not in found]
    return tuple(found)


def read_inputs(path: Path) -> tuple[Wanted, ...]:
    """Every requirement of a ``.in`` file and of the files it includes."""
    return tuple(
        Wanted(_requirement(line, file.name), file.name)
        for file in input_files(path)
        for line in logical_lines(read_text(file))
        if not line.startswith("-")
    )


def input_digest(path: Path, options: Sequence[str]) -> str:
    """Digest of a lock's inputs: the requirements of its ``.in`` files, in any layout, and the resolver's options."""
    wanted = sorted(str(item.requirement) for item in read_inputs(path))
    return sha256("\n".join([*wanted, *options]).encode()).hexdigest()


def recorded_digest(text: str) -> str:
    """The input digest that ``nox -s lock`` wrote into a lock file; empty if there is none."""
    match = INPUT_DIGEST.search(text)
    return match[1] if match else ""


def check_lock(wanted: Iterable[Wanted], pins: Collection[Pin], environment: Mapping[str, str]) -> None:
    """Raise LockError unless ``pins`` satisfy every applicable requirement of ``wanted``."""
    by_name = {pin.name: pin for pin in pins if pin.applies(environment)}
    for item in wanted:
        marker = item.requirement.marker
        if marker is not None and not marker.evaluate(dict(environment)):
            continue
        pin = by_name.get(item.name)
        if pin is None:
            msg = f"{item.origin} asks for {item.requirement}, but the lock has no pin for {item.name}; {REWRITE}"
            raise LockError(msg)
        if not item.requirement.specifier.contains(pin.version, prereleases=True):
            msg = f"{item.origin} asks for {item.requirement}, but the lock has {pin.name}=={pin.version}; {REWRITE}"
            raise LockError(msg)


def installed_distributions(path: Sequence[str] | None = None) -> dict[str, list[str]]:
    """The versions of every distribution on ``path`` (default ``sys.path``), by name; several if it is installed twice."""
    found = {
        (canonicalize_name(name), item.version, Path(str(item.locate_file(""))).resolve())
        for item in metadata.distributions(path=list(sys.path if path is None else path))
        if (name := item.metadata["Name"])
    }
    by_name: dict[str, list[str]] = {}
    for name, version, _ in sorted(found):
        by_name.setdefault(name, []).append(version)
    return by_name


def find_drift(
    pins: Iterable[Pin],
    installed: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    names: Collection[str] | None = None,
) -> list[str]:
    """How ``installed`` differs from ``pins``, in words, for all packages or only for ``names``. Empty if it does not."""
    expected = {pin.name: pin.version for pin in pins if pin.applies(environment)}
    if names is not None:
        wanted = {canonicalize_name(name) for name in names}
        expected = {name: version for name, version in expected.items() if name in wanted}
    drift = []
    for name, version in sorted(expected.items()):
        found = installed.get(name, ())
        if not found:
            drift.append(f"{name} is not installed; the lock has {version}")
        elif len(found) > 1:
            drift.append(f"{name} is installed more than once ({' and '.join(found)}); the lock has {version}")
        elif Version(found[0]).public != Version(version).public:
            drift.append(f"{name} is {found[0]}; the lock has {version}")
    if names is None:
        extra = sorted(set(installed) - set(expected) - {DISTRIBUTION})
        drift += [f"{name} {installed[name][0]} is installed but not in the lock" for name in extra]
    return drift


def marker_environment(python: str = "", machine: str = "x86_64") -> dict[str, str]:
    """The environment for evaluating markers: this interpreter, or CPython of the full version ``python`` on Linux and ``machine``."""
    known = {key: str(value) for key, value in default_environment().items()}
    if not python:
        return known
    return known | {
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "implementation_name": "cpython",
        "implementation_version": python,
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
    }


def verify_environment(
    lock: Path,
    *,
    names: Collection[str] | None = None,
    path: Sequence[str] | None = None,
    python: str = "",
    machine: str = "x86_64",
) -> tuple[Pin, ...]:
    """Raise LockError unless the installed packages are those of ``lock``; returns its pins.

    ``names`` limits the check to the packages that affect the result, for a build in an environment that the user
    made (``pip wheel .``); ``path``, ``python`` (a full version) and ``machine`` describe an environment other than the running one.
    A requirement in ``x.in`` without a pin in ``x.txt`` is an error too.
    """
    pins = read_lock(lock)
    environment = marker_environment(python, machine)
    check_lock(read_inputs(lock.with_suffix(".in")), pins, environment)
    drift = find_drift(pins, installed_distributions(path), environment, names)
    if drift:
        listed = "\n".join(f"  - {item}" for item in drift)
        msg = (
            f"this environment is not the one that {lock.name} describes:\n{listed}\n"
            "Delete the environment and run the same session again: it is recreated from the lock (`./nox -s build`)."
        )
        raise LockError(msg)
    return pins


def main(arguments: Sequence[str]) -> int:
    """``python -m flashmoe_build.environments.lock FILE``: 0 if this interpreter's environment is the locked one, else 1."""
    is_help = bool({"-h", "--help"} & set(arguments))
    if is_help or len(arguments) != 1:
        print(
            "usage: python -m flashmoe_build.environments.lock lockfiles/NAME.txt",
            file=sys.stdout if is_help else sys.stderr,
        )
        return 0 if is_help else 2
    try:
        pins = verify_environment(Path(arguments[0]))
    except LockError as error:
        print(f"LockError: {error}", file=sys.stderr)
        return 1
    print(f"{arguments[0]}: every package is installed once and at its pinned version ({len(pins)} lines)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
