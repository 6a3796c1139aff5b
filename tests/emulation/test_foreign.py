"""Another project uses csrc/emulation: a copy of the folder, its own kernel and main, g++, and nothing else."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flashmoe_build.compile.jobs import run_all
from flashmoe_build.emulation.build import CSRC, compiler, jobs

FOREIGN = Path(__file__).parent / "foreign"
FLAGS = ("-std=c++17", "-O1", "-g", "-I.", "-Iemulation/include")
KERNEL_FLAGS = ("-include", "emulation/prelude.h")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the other project, with the machine compiled."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(CSRC / "emulation", folder / "emulation")
    for path in FOREIGN.iterdir():
        shutil.copy(path, folder)
    sources = sorted((folder / "emulation").glob("*.cpp"))
    run_all(sources, lambda source: _compile(folder, "-c", str(source), "-o", f"{source.stem}.o"), jobs())
    return folder


def _compile(folder: Path, *words: str) -> None:
    result = subprocess.run([compiler()[0], *FLAGS, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def build(project: Path, bug: int) -> Path:
    program = project / f"product{bug}"
    objects = sorted(str(path) for path in project.glob("*.o"))
    _compile(project, *KERNEL_FLAGS, f"-DBUG={bug}", "main.cpp", *objects, "-o", program.name)
    return program


def run(program: Path, seed: int) -> tuple[dict[str, Any], float]:
    result = subprocess.run([str(program), str(seed)], capture_output=True, text=True, check=True, timeout=60)
    report, error = result.stdout.splitlines()
    return json.loads(report), float(error)


def test_a_foreign_kernel_runs(project: Path) -> None:
    program = build(project, 0)
    for seed in range(9):
        report, error = run(program, seed)
        assert report["failure"] is None
        assert error == 0  # small whole numbers: every sum is exact
        assert report["statistics"]["matrix_products"] == 11


@pytest.mark.parametrize(
    ("bug", "kinds", "wrapper", "line"),
    [
        (1, {"race", "uninitialised_read"}, "ldmatrix_x[42]", "ldmatrix_x[42]\\("),
        (2, {"race", "uninitialised_read"}, "ldmatrix_x[42]", "ldmatrix_x[42]\\("),
        (3, {"race", "uninitialised_read"}, "(ld|st)_shared_float", "(ld|st)_shared_float\\("),
        (4, {"out_of_bounds"}, "cp_async_16", "cp_async_16\\("),
    ],
)
def test_a_foreign_bug_is_reported(project: Path, bug: int, kinds: set[str], wrapper: str, line: str) -> None:
    """With the kernel, the block, the warp, the lane and the call site."""
    program = build(project, bug)
    for seed in range(6):
        report, _ = run(program, seed)
        assert report["kernel"] == "small_product"
        failure = report["failure"]
        assert failure is not None
        assert failure["kind"] in kinds
        assert failure["block"] == 0
        assert failure["warp"] == failure["thread"] // 32
        assert failure["lane"] == failure["thread"] % 32
        assert re.fullmatch(wrapper, failure["what"])
        assert failure["file"] == "kernel.cuh"
        text = (FOREIGN / "kernel.cuh").read_text(encoding="utf-8").splitlines()
        assert re.search(line, text[failure["line"] - 1])
        assert failure["function"] in ("multiply", "add_up")


def test_the_folder_names_nothing_outside_itself() -> None:
    """No file of csrc/emulation includes a file of the project from outside the folder."""
    root = CSRC / "emulation"
    for path in [p for p in root.rglob("*") if p.suffix in (".h", ".cpp", ".cuh")]:
        for name in re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8")):
            places = (CSRC / name, root / "include" / name)
            assert any(place.is_file() and place.is_relative_to(root) for place in places), f"{path}: {name}"


def test_the_readme_shows_this_program() -> None:
    readme = (CSRC / "emulation" / "README.md").read_text(encoding="utf-8")
    program = {line.strip() for line in (FOREIGN / "main.cpp").read_text(encoding="utf-8").splitlines()}
    shown = [line.strip() for line in re.findall(r"```cpp\n(.*?)```", readme, re.DOTALL)[0].splitlines()]
    assert len(shown) > 15
    assert not [line for line in shown if line and line not in program]
