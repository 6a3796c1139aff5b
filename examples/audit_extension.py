"""An extension that links but would fail at import, found by the audit; then the same extension, repaired.

The first build forgets a source file. A linker allows that in a shared library, so the build succeeds and the import fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

BINDING = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

torch::stable::Tensor twice(torch::stable::Tensor x);  // defined in kernel.cpp

STABLE_TORCH_LIBRARY(example, m) { m.def("twice(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(example, CPU, m) { m.impl("twice", TORCH_BOX(&twice)); }
"""
KERNEL = """
#include <torch/csrc/stable/ops.h>

torch::stable::Tensor twice(torch::stable::Tensor x) {
  auto result = torch::stable::empty_like(x);
  const float* from = static_cast<const float*>(x.data_ptr());
  float* to = static_cast<float*>(result.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = 2 * from[i];
  return result;
}
"""
LIBRARIES = Path(torch.__file__).parent / "lib"
COMPILE = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-isystem{LIBRARIES.parent / 'include'}"]
COMPILE += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]


def build(folder: Path, name: str, *sources: str) -> Path:
    library = folder / name
    subprocess.run([*COMPILE, *sources, "-o", name, f"-L{LIBRARIES}", "-ltorch_cpu", "-lc10"], cwd=folder, check=True)
    return library


def audit(library: Path) -> list[str]:
    """Returns the failed checks. On a command line: `flashmoe audit mine.so --foreign --source .`"""
    report = library.with_suffix(".json")
    words = ["audit", str(library), "--foreign", "--source", str(library.parent), "--json", str(report)]
    subprocess.run([sys.executable, "-m", "flashmoe", *words], check=False)
    checks = json.loads(report.read_text())["checks"]
    failed = [f"{check['name']}: {check['found']}" for check in checks if check["verdict"] == "FAIL"]
    print(f"-- failed of {library.name}: {failed or 'nothing'}\n", flush=True)
    return failed


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    (folder / "binding.cpp").write_text(BINDING)
    (folder / "kernel.cpp").write_text(KERNEL)
    assert any("twice" in failure for failure in audit(build(folder, "forgotten.so", "binding.cpp")))
    complete = build(folder, "complete.so", "binding.cpp", "kernel.cpp")
    # Compiled on a recent system, it may still need a newer C library than wheels for all systems may require.
    assert all("GLIBC" in failure for failure in audit(complete))
    torch.ops.load_library(complete)
    assert torch.ops.example.twice(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
