"""``nox -s hub``: writes the layout of a Hugging Face kernels repository to build/hub, from a wheel, and tests it.

The `kernels` library loads a variant's folder as the module that metadata.json names as ``id``. Ours is ``flashmoe``: the package's
absolute imports then resolve to that folder, and the operators are in ``torch.ops.flashmoe``, as the Hub requires. The drawback is that
a process has one version, the first that it imports, and that an installed flashmoe counts.
"""

import argparse
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from flashmoe._version import WHEEL_PREFIX
from flashmoe.errors import BuildError
from flashmoe_build.links import ROOT, repository
from flashmoe_build.program import Stopwatch, ending
from flashmoe_tools.report import Check, Verdict, write_report

OUT = ROOT / "build" / "hub"
NAME = "flashmoe"
LIBRARY = "libflashmoe.so"
# One library for all: it is not linked against CUDA, and its stable ABI is torch 2.10's. `kernels` accepts a variant for the same CUDA
# major version and any minor version that is not newer.
VARIANTS = tuple(f"torch-stable-abi210-{backend}-x86_64-linux" for backend in ("cpu", "cu120", "cu130"))
MINIMUM_KERNELS = "0.17.0"  # older versions give the module another name
EXCLUDED = ("flashmoe/_tables/", "flashmoe/__main__.py")
CHECKER_MANYLINUX, CHECKER_PYTHON = "manylinux_2_28", "3.9"
README = """---
license: apache-2.0
tags: [kernels]
---

# flashmoe

Fused attention and mixture-of-experts kernels for PyTorch, on NVIDIA GPUs from compute capability 7.5 on and on CPUs.

```python
from kernels import get_kernel

flashmoe = get_kernel("OWNER/flashmoe", version={version}, trust_remote_code=True)
out = flashmoe.attention(q, k, v, causal=True)
```

A process has one version, the first that it imports, an installed `flashmoe-kernels` included: each registers `torch.ops.flashmoe`.
Sources, documentation and measurements: {home}. Each variant holds the provenance of the library.
"""


def package_files(wheel: Path) -> dict[str, bytes]:
    """The contents of a variant's folder: the package as users import it, with its library, by path below the folder."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("flashmoe/") and not name.startswith(EXCLUDED)]
        found = {PurePosixPath(name).relative_to("flashmoe").as_posix(): archive.read(name) for name in names}
    if LIBRARY not in found or "__init__.py" not in found:
        msg = f"{wheel.name} contains no flashmoe/{LIBRARY}; name a wheel of `nox -s build`"
        raise BuildError(msg)
    return found


def architectures(targets: Iterable[str]) -> list[str]:
    """The targets of provenance.json in the Hub's notation: sm_90a is 9.0a, compute_80 is 8.0+PTX."""
    names = []
    for target in targets:
        kind, _, number = target.partition("_")
        digits = number.rstrip("af")
        suffix = "+PTX" if kind == "compute" else number[len(digits) :]
        names.append(f"{digits[:-1]}.{digits[-1]}{suffix}")
    return sorted(names, key=lambda name: (float(name.rstrip("afPTX+")), name))


def metadata(variant: str, files: Mapping[str, bytes], home: str) -> dict[str, Any]:
    """metadata.json of one variant; ``files`` does not include it."""
    stated = json.loads(files["provenance.json"])
    is_cpu = variant.split("-")[3] == "cpu"
    backend = {"type": "cpu"} if is_cpu else {"type": "cuda", "archs": architectures(stated["targets"])}
    digests = {name: base64.b64encode(hashlib.sha256(data).digest()).decode() for name, data in sorted(files.items())}
    return {
        "name": NAME,
        "id": NAME,
        "version": int(str(stated["version"]).partition(".")[0]),
        "kernels-minver": MINIMUM_KERNELS,
        "license": "Apache-2.0",
        "upstream": home,
        "python-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": digests},
    }


def write(wheel: Path, out: Path) -> tuple[Path, ...]:
    """Write the repository into ``out``, replacing what was there; returns the variants' folders. Deterministic for a wheel."""
    files, home = package_files(wheel), repository()
    shutil.rmtree(out, ignore_errors=True)
    folders = []
    for variant in VARIANTS:
        folder = out / "build" / variant
        stated = metadata(variant, files, home)
        for name, data in {**files, "metadata.json": json.dumps(stated, indent=1).encode() + b"\n"}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        folders.append(folder)
    text = README.format(version=stated["version"], home=home)
    (out / "README.md").write_text(text, encoding="utf-8")
    shutil.copyfile(ROOT / "LICENSE", out / "LICENSE")
    return tuple(folders)


def check_digest(folder: Path) -> Check:
    """The hashes in metadata.json, checked by the code with which the `kernels` library verifies a download."""
    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    name, expected = f"{folder.name}: digest", "the files' hashes"
    try:
        stated = Metadata.read_from_file(folder / "metadata.json").digest
        stated.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
    except (ValueError, DigestValidationError) as error:
        return Check(name, Verdict.FAIL, str(error), expected, "`kernels` refuses such a variant", "nox -s hub")
    return Check(name, Verdict.PASS, f"{len(stated.files)} files", expected)


def check_abi(folder: Path) -> Check:
    """The Hub's own ABI checker on the library."""
    from kernel_abi_check import ObjectFile

    library = ObjectFile(str(folder / LIBRARY))
    found = [*library.check_manylinux(CHECKER_MANYLINUX), *library.check_python_abi(CHECKER_PYTHON)]
    name, expected = f"{folder.name}: kernel-abi-check", f"{CHECKER_MANYLINUX}, Python ABI {CHECKER_PYTHON}"
    if found:
        shown = ", ".join(map(repr, found[:5]))
        return Check(name, Verdict.FAIL, shown, expected, "the Hub's rules for kernels", "nox -s symbols")
    return Check(name, Verdict.PASS, "nothing forbidden", expected)


LOAD = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]), backend=sys.argv[2] or None)
device = "cuda" if torch.cuda.is_available() and sys.argv[2] != "cpu" else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
q, k, v = (torch.randn(1, 2, 65, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
out = kernel.attention(q, k, v, causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
out.sum().backward()
assert torch.allclose(out, expected, atol=2e-3), (out - expected).abs().max()
weights, ids = kernel.topk_route(torch.randn(9, 4, device=device, dtype=dtype), 2)
assert kernel.fused_moe(q[0, 0, :9], q[0].new_ones(4, 32, 64), q[0].new_ones(4, 64, 16), weights, ids).shape == (9, 64)
print(Path(kernel.__file__).parent.name, "on", device)
"""


def check_load(out: Path, backend: str) -> Check:
    """The `kernels` library loads it in a separate process, away from this checkout, and the results match torch's."""
    name = f"kernels.get_local_kernel, {backend or 'the backend of this torch'}"
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "FLASHMOE_LIBRARY")}
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", LOAD, str(out), backend],
        cwd=out,
        env={**kept, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    expected = "a variant of ours, and torch's results"
    if done.returncode == 0:
        return Check(name, Verdict.PASS, done.stdout.strip(), expected)
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return Check(
        name, Verdict.FAIL, last, expected, "no user could load it from the Hub", "the same by hand, in build/hub"
    )


def check(out: Path, folders: Sequence[Path]) -> tuple[Check, ...]:
    checks = [one(folder) for folder in folders for one in (check_digest, check_abi)]
    return (*checks, check_load(out, ""), check_load(out, "cpu"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="nox -s hub --", description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help=f"dist/{WHEEL_PREFIX}*.whl")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    return ending(lambda: lay_out(options.wheel, options.out, options.json))


def lay_out(wheel: Path, out: Path, path: Path | None) -> int:
    """Write the repository, check it, and write the report to ``path``."""
    clock = Stopwatch()
    try:
        folders = write(wheel, out)
    except (OSError, zipfile.BadZipFile) as error:
        msg = f"{wheel.name} cannot be laid out: {error}"
        raise BuildError(msg) from error
    report = clock.report("hub", check(out, folders), {"wheel": wheel.name})
    for one in report.checks:
        print(f"{one.verdict!s:4}  {one.name}: {one.found}")
    if path:
        write_report(path, report)
    print(f"{out}: {len(folders)} variants, {report.verdict}")
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
