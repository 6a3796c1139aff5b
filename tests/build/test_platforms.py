"""Host code for another machine: which files, which compiler, which names."""

import platform
from pathlib import Path

import pytest

from flashmoe.errors import BuildError
from flashmoe_build.compile import toolchain
from flashmoe_build.compile.host import host_sources
from flashmoe_build.compile.toolchain import PLATFORM_VARIABLE, PLATFORMS, chosen_platform
from flashmoe_build.release.wheel import build_folder, wheel_tag

ROOT = Path(__file__).resolve().parents[2]
OTHER = next(name for name in PLATFORMS if name != platform.machine())


def test_each_platform_has_every_kernel_once_for_each_of_its_instruction_sets() -> None:
    names = {name: {path.stem for path in host_sources(ROOT, Path("table.cpp"), name)} for name in PLATFORMS}
    only = {name: names[name] - set.intersection(*names.values()) for name in PLATFORMS}
    assert only["aarch64"] == {"forward_neon", "backward_neon", "kernel_neon"}
    assert {"forward_sse2", "backward_sse2", "kernel_sse2", "forward_amx"} <= only["x86_64"]
    assert all(stem.startswith(("forward_", "backward_", "kernel_")) for stem in only["x86_64"])


def test_names() -> None:
    assert chosen_platform({}) == platform.machine()
    assert build_folder(ROOT, {}) == ROOT / "build"
    environ = {PLATFORM_VARIABLE: OTHER}
    assert (build_folder(ROOT, environ), wheel_tag(environ)) == (
        ROOT / "build" / OTHER,
        f"py3-none-manylinux_2_28_{OTHER}",
    )
    with pytest.raises(BuildError, match=r"no host code for riscv64; .* is one of x86_64, aarch64"):
        chosen_platform({PLATFORM_VARIABLE: "riscv64"})


@pytest.mark.parametrize(
    ("cxx", "words"),
    [("", rf"no host compiler '{OTHER}-linux-gnu-g\+\+' .* g\+\+-{OTHER}-linux-gnu"), ("g++", rf"not for {OTHER}")],
)
def test_the_host_compiler_is_for_the_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cxx: str, words: str
) -> None:
    (tmp_path / "g++").write_text(f"#!/bin/sh\necho {platform.machine()}-linux-gnu\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(BuildError, match=words):
        toolchain._host_compiler(OTHER)
