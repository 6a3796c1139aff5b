"""The pinned wheels: downloaded by pip, checked by hash, read as archives, deleted. The modules that the contract names are kept in build/engines."""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flashmoe.errors import BuildError
from flashmoe_build.engines.contract import Clause, Defines, Found, Has, number_of
from flashmoe_build.engines.signatures import abstract_methods, names, signature
from flashmoe_build.program import ROOT, OutOfReachError
from flashmoe_tools.progress import Progress
from flashmoe_tools.toml import tomllib

PINS = Path(__file__).with_name("wheels.toml")
KEPT = ROOT / "build" / "engines"
LIMIT_S = 1800
PYTHON = "3.11"  # whose wheels are read; none of their code runs
UNREACHABLE = re.compile(
    r"No matching distribution|Connection|Temporary failure|timed out|Network is unreachable|No module named pip"
)


@dataclass(frozen=True)
class Wheel:
    engine: str
    file: str
    sha256: str = ""  # "": not checked, for a version newer than the pins

    @property
    def version(self) -> str:
        return self.file.split("-")[1]

    @property
    def platform(self) -> str:
        return self.file.removesuffix(".whl").split("-")[-1].split(".")[0]

    @property
    def label(self) -> str:
        return f"{self.engine} {self.version}"


def pinned(path: Path = PINS) -> list[Wheel]:
    return [Wheel(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["wheel"]]


def modules_of(clauses: Iterable[Clause]) -> list[str]:
    return sorted({clause.theirs.partition(":")[0] for clause in clauses})


def members_of(module: str) -> tuple[str, str]:
    """Possible paths of a module in a wheel."""
    path = module.replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


def sources(wheel: Wheel, clauses: Sequence[Clause], kept: Path = KEPT) -> Path:
    """The folder with this wheel's METADATA and the modules that the contract names; downloads the wheel if it is missing."""
    folder = kept / f"{wheel.engine}-{wheel.version}"
    stamp = folder / "modules.txt"
    expected = "\n".join([wheel.sha256, *modules_of(clauses)])
    if wheel.sha256 and stamp.is_file() and stamp.read_text(encoding="utf-8") == expected:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="flashmoe-engines-") as scratch:
        archive = download(wheel, Path(scratch))
        extract(archive, modules_of(clauses), folder)
    stamp.write_text(expected, encoding="utf-8")
    return folder


def extract(archive: Path, modules: Iterable[str], folder: Path) -> None:
    """Extracts the modules. One that is missing is skipped: the comparison reports which clause lacks it."""
    with zipfile.ZipFile(archive) as wheel:
        present = set(wheel.namelist())
        found = [name for module in modules for name in members_of(module) if name in present]
        info = [name for name in present if PurePosixPath(name).match("*.dist-info/METADATA")]
        for name in found:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(wheel.read(name))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_bytes(wheel.read(info[0]))


def download(wheel: Wheel, folder: Path) -> Path:
    """Downloads by pip for the wheel's platform, on any machine; raises OutOfReachError without an index."""
    requirement = f"{wheel.engine}=={wheel.version}"
    options = [
        "--no-deps",
        "--no-cache-dir",
        "--only-binary",
        ":all:",
        "--platform",
        wheel.platform,
        "--python-version",
        PYTHON,
    ]
    options += ["--implementation", "cp", "--abi", f"cp{PYTHON.replace('.', '')}", "--abi", "abi3", "--abi", "none"]
    if wheel.sha256:
        listed = folder / "wheel.txt"
        listed.write_text(f"{requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        words = ["--require-hashes", "-r", str(listed)]
    else:
        words = [requirement]
    _pip(["download", "-q", "-d", str(folder), *options, *words], f"downloading {wheel.label}")
    files = list(folder.glob("*.whl"))
    if len(files) != 1:
        msg = f"pip brought {len(files)} wheels of {requirement}; expected one"
        raise BuildError(msg)
    if wheel.sha256 and hashlib.sha256(files[0].read_bytes()).hexdigest() != wheel.sha256:
        msg = f"{files[0].name} does not have the hash of wheels.toml: do not use it"
        raise BuildError(msg)
    return files[0]


def newest(engine: str, after: Sequence[Wheel]) -> Wheel | None:
    """The newest release on the index, if it is newer than the pins; for the platform of the last pin."""
    text = _pip(["index", "versions", engine], f"looking for releases of {engine}")
    match = re.search(r"Available versions: (.*)", text)
    releases = [word for word in match[1].split(", ") if re.fullmatch(r"[\d.]+(post\d+)?", word)] if match else []
    if not releases:
        msg = f"`pip index versions {engine}` gave no list"
        raise OutOfReachError(msg)
    last = after[-1]
    found = max(releases, key=number_of)
    return Wheel(engine, last.file.replace(last.version, found)) if number_of(found) > number_of(last.version) else None


def _pip(args: Sequence[str], what: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    with Progress(what):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode == 0:
        return done.stdout + done.stderr
    last = " ".join(done.stderr.strip().splitlines()[-1:])[:300]
    kind = OutOfReachError if UNREACHABLE.search(done.stderr) else BuildError
    msg = f"{what} failed: {last}"
    raise kind(msg)


def read(folder: Path, clauses: Sequence[Clause]) -> dict[str, Found]:
    """What each clause names, read from a folder of sources."""
    texts: dict[str, str] = {}
    for module in modules_of(clauses):
        file = next((folder / name for name in members_of(module) if (folder / name).is_file()), None)
        texts[module] = "" if file is None else file.read_text(encoding="utf-8")
    found: dict[str, Found] = {}
    for clause in clauses:
        module, _, path = clause.theirs.partition(":")
        if isinstance(clause, Defines):
            found[clause.key] = abstract_methods(texts[module], path)
        elif isinstance(clause, Has):  # of all names found, those that some clause needs
            required = {
                name for one in clauses if isinstance(one, Has) and one.theirs == clause.theirs for name in one.names
            }
            found[clause.key] = names(texts[module], path) & required
        else:
            found.setdefault(clause.key, signature(texts[module], path))
    return found


def torch_of(folder: Path) -> str:
    """The torch version that a wheel requires, from its METADATA."""
    match = re.search(
        r"^Requires-Dist: torch(?![\w-]) *([^;\s]*)", (folder / "METADATA").read_text(encoding="utf-8"), re.MULTILINE
    )
    return (match[1].strip("()").removeprefix("==") or "any") if match else "none"
