"""Tiny wheels, written by hand, so that the tests need neither a network nor a build backend."""

import zipfile
from hashlib import sha256
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, body: str = "") -> str:
    """Write ``name-version-py3-none-any.whl``, with one module, into ``folder``; returns its sha256."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n{body}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in [*files.items(), (f"{info}/RECORD", record)]:
            archive.writestr(zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0)), text)
    return sha256(path.read_bytes()).hexdigest()
