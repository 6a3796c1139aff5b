"""The plugin that runs flash_attn's test files: a file like theirs, of which a sample runs on the CPU."""

import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_tools.flash_attn_tests import PAIRS, drawn, pairwise
from tests.forked_python import SAFE_PATH

FILE = """
import pytest, torch
from flash_attn import flash_attn_func
from flash_attn_interface import flash_attn_varlen_func
assert torch.cuda.get_device_capability("cuda") == (9, 0)

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [32, 64, 80])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 9), (5, 7), (8, 8)])
def test_out(seqlen_q, seqlen_k, d, causal, dtype):
    q = torch.randn(1, seqlen_q, 2, d, device="cuda", dtype=dtype)
    k = torch.randn(1, seqlen_k, 2, d, device="cuda", dtype=dtype)
    assert flash_attn_func(q, k, k, causal=causal).shape == q.to("cuda").shape

def test_plain():
    assert torch.cuda.synchronize() is None
"""


def run(folder: Path, *words: str) -> str:
    path = folder / "test_theirs.py"
    path.write_text(FILE)
    command = [
        sys.executable,
        *SAFE_PATH,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
    ]
    command += ["-p", "flashmoe_tools.flash_attn_tests", "--on-cpu", "-v", *words, str(path)]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=alone)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_drawn_file_keeps_the_names_of_the_whole_one(tmp_path: Path) -> None:
    lengths, dims, masks, dtypes = ("1-9", "5-7", "8-8"), (32, 64, 80), (False, True), ("dtype0", "dtype1")
    # Like pytest without the plugin
    whole = {"-".join(map(str, names)) for names in itertools.product(lengths, dims, masks, dtypes)}
    output = run(tmp_path, "--draw", "5", "--draw-seed", "3")
    some = set(re.findall(r"test_out\[(.*?)\] PASSED", output))
    assert len(some) == 5
    assert some <= whole
    assert "test_plain PASSED" in output


def test_a_draw_is_its_seed_s_and_has_no_repetition() -> None:
    pairs = pytest.mark.parametrize("b,c", [(1, 2), (3, 4)]).mark  # noqa: PT006 (as in their files)
    marks = [pytest.mark.parametrize("a", range(10)).mark, pairs]
    first, again, other = (drawn(marks, 12, random.Random(seed))[0].args[1] for seed in (1, 1, 2))
    values = [tuple(row.values) for row in first]
    assert values == [tuple(row.values) for row in again] != [tuple(row.values) for row in other]
    assert len(set(values)) == 12
    assert all((b, c) in {(1, 2), (3, 4)} for _, b, c in values)
    assert drawn(marks, 20, random.Random(1)) == marks


def test_each_pair_of_values_is_drawn(tmp_path: Path) -> None:
    sizes = (2, 2, 3, 1, 7, 2, 10)
    rows = pairwise(sizes, random.Random(5))
    assert rows == pairwise(sizes, random.Random(5)) != pairwise(sizes, random.Random(6))
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(range(sizes[a]), range(sizes[b])))
    assert 70 <= len(rows) < 2 * 70  # seven times ten is the minimum
    marks = [pytest.mark.parametrize("a", range(3)).mark, pytest.mark.skipif(False, reason="stays")]
    only, mark = drawn(marks, PAIRS, random.Random(1))
    assert [row.values for row in only.args[1]] == [(0,), (1,), (2,)]
    assert mark is marks[1]
    output = run(tmp_path, "--draw-pairs")
    found = [name.split("-") for name in re.findall(r"test_out\[(.*?)\] PASSED", output)]
    assert {(lengths, dim) for lengths, _, dim, *_ in found} == {(n, d) for n in "158" for d in ("32", "64", "80")}
    assert "test_plain PASSED" in output
