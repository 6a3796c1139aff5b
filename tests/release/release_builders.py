"""Builders for the release tests: rows, a provenance, a repository. Nothing is compiled for a device."""

import hashlib
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "audit"))

from audit_builders import PACKAGE, Row, Workshop

from flashmoe.errors import ExitCode
from flashmoe_tools import links, sbom
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.verify.cli import Request, verify
from flashmoe_tools.verify.repository import Clone, find_clone

__all__ = [
    "PACKAGE",
    "Row",
    "Workshop",
    "git",
    "host_compiler",
    "package_of",
    "provenance_of",
    "rows",
    "version_here",
    "write_sources",
]

PYPROJECT = """\
[project]
name = "flash-moe"
description = "a small project"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = ">=3.10"
dynamic = ["readme", "version"]
dependencies = ["torch>=2.10", "tomli>=2.0; python_version < '3.11'"]
classifiers = ["Typing :: Typed"]
[project.optional-dependencies]
tools = ["rich"]
[project.urls]
Source = "https://example.org/project"
[project.scripts]
flashmoe = "flashmoe.__main__:main"
[tool.hatch.build.targets.wheel]
packages = ["flashmoe", "flashmoe_tools"]
"""
METADATA = """\
Metadata-Version: 2.5
Name: flash-moe
Version: {version}
Summary: a small project
Project-URL: Source, https://example.org/project
License-Expression: Apache-2.0
License-File: LICENSE
Classifier: Typing :: Typed
Requires-Python: >=3.10
Requires-Dist: tomli>=2.0; python_version < '3.11'
Requires-Dist: torch>=2.10
Provides-Extra: tools
Requires-Dist: rich; extra == 'tools'
Description-Content-Type: text/markdown

# A small project
[more](https://example.org/project/blob/v0.1.0/docs/more.md)
"""
LOCK = """\
hatchling==1.33.0 ; sys_platform == 'linux' \\
    --hash=sha256:00
nvidia-cuda-nvcc-cu12==12.8.93
nvidia-cuda-nvrtc-cu12==12.8.93
nvidia-cuda-runtime-cu12==12.8.90
torch==2.10.0
"""
README = "# A small project\n[more](docs/more.md)\n"

VERSION = '"""The version."""\n\n__version__ = "0.1.0"\n'
TABLES = ("tables/arch.toml", "attention/operations.toml", "attention/kernels.toml")
KERNEL = b"\x7fELF bf16 "  # the beginning of a device binary in the valid wheel


def write_sources(root: Path) -> None:
    """The files of a commit that `verify` reads."""
    files = {
        **PACKAGE,
        "flashmoe/_version.py": VERSION,
        "flashmoe_tools/__init__.py": "",
        "flashmoe_tools/links.py": Path(links.__file__).read_text(),
        "flashmoe_tools/sbom.py": Path(sbom.__file__).read_text(),
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        "LICENSE": "as is\n",
        "lockfiles/build.txt": LOCK,
        "flashmoe_build/__init__.py": "",
        **{f"csrc/{name}": f"# {name}\n" for name in TABLES},
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@lru_cache(maxsize=1)
def host_compiler() -> str:
    """The compiler as named in provenance.json."""
    done = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True)
    return f"g++ {done.stdout.strip()}"


def version_here(clone: Path) -> str:
    return f"0.1.0.dev0+g{git(clone, 'rev-parse', 'HEAD')[:12]}"


def package_of(version: str) -> dict[str, bytes | str]:
    """What a build makes of these sources, without the compiled library, its provenance and RECORD."""
    info = f"flash_moe-{version}.dist-info"
    return {
        **PACKAGE,
        "flashmoe/_version.py": VERSION.replace("0.1.0", version),
        "flashmoe_tools/__init__.py": "",
        "flashmoe_tools/links.py": Path(links.__file__).read_text(),
        "flashmoe_tools/sbom.py": Path(sbom.__file__).read_text(),
        **{f"flashmoe/_tables/{name}": f"# {name}\n" for name in TABLES},
        f"{info}/METADATA": METADATA.format(version=version),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hatchling 1.33.0\nRoot-Is-Purelib: false\nTag: py3-none-manylinux_2_28_x86_64\n",
        f"{info}/entry_points.txt": "[console_scripts]\nflashmoe = flashmoe.__main__:main\n",
        f"{info}/licenses/LICENSE": "as is\n",
    }


def rows() -> tuple[Row, ...]:
    """Two device binaries; here their content is only checked by hash, the audit is tested elsewhere."""
    return tuple(
        Row(f"attention_{dtype}", "sm_80", f"\x7fELF {dtype} ".encode() * 20, (f"kernel_{dtype}",), 1024, 128)
        for dtype in ("f16", "bf16")
    )


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def provenance_of(library: bytes, clone: Path, **changes: Any) -> dict[str, Any]:
    """The provenance that a build would write for this library from the clone's commit."""
    return {
        "schema": "flashmoe.provenance/1",
        "version": version_here(clone),
        "commit": git(clone, "rev-parse", "HEAD"),
        "dirty": False,
        "source_date_epoch": int(git(clone, "log", "-1", "--format=%ct")),
        "locks": {"build.txt": hashlib.sha256((clone / "lockfiles" / "build.txt").read_bytes()).hexdigest()},
        "compilers": {
            "nvrtc": "12.8.93",
            "ptxas": "12.8.93",
            "cuda_headers": "12.8.90",
            "torch_headers": "2.10.0",
            "cxx": host_compiler(),
            **changes.pop("compilers", {}),
        },
        "platform": "x86_64",
        "targets": ["sm_80"],
        "extension_sha256": hashlib.sha256(library).hexdigest(),
        "binaries": [
            {"name": row.name, "target": row.target, "sha256": row.digest, "size": len(row.content), "entries": list(row.entries)}
            for row in rows()
        ],
        **changes,
    }  # fmt: skip


def clone_of(root: Path) -> Clone:
    found = find_clone(root)
    assert found is not None
    return found


def checked(wheel: Path, root: Path) -> Report:
    return verify(wheel, Request(clone_of(root)))


def problems(report: Report) -> list[Check]:
    return [check for check in report.checks if check.verdict not in (Verdict.PASS, Verdict.SKIP)]


def only_failure(report: Report) -> Check:
    (only,) = problems(report)
    assert only.verdict is Verdict.FAIL
    assert report.exit_code == ExitCode.FAILED
    return only
