"""Every example runs and its assertions hold. One process each, because they replace functions and register operators."""

import json
import shutil
from pathlib import Path

import pytest

from tests.forked_python import run_python

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NOTEBOOKS = sorted((FOLDER / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(example: Path, tmp_path: Path) -> None:
    if example.stem == "audit_extension" and shutil.which("g++") is None:
        pytest.skip("it compiles an extension: no g++ here")
    alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = run_python("-W", "error", str(example), environ=alone, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(notebook: Path, tmp_path: Path) -> None:
    """Its cells have no saved output. In a process that has imported nothing, as a kernel has not."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    script = tmp_path / f"{notebook.stem}.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in code), encoding="utf-8")
    done = run_python(str(script), environ={"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_each_is_in_the_list_and_short() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert NOTEBOOKS
    for notebook in NOTEBOOKS:
        assert f"[{notebook.name}](notebooks/{notebook.name})" in listed
    for example in EXAMPLES:
        assert f"[{example.name}]({example.name})" in listed
        most = {"train_fp8.py": 140, "model_families.py": 145}.get(example.name, 90)  # plots losses; compares routing
        assert len(example.read_text(encoding="utf-8").splitlines()) <= most, example.name
