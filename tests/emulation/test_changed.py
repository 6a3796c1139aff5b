"""A kernel that differs from the upstream commit is found by its source, and its quick run finds a removed barrier."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flashmoe.errors import ArgumentError, ExitCode
from flashmoe_build.emulation import cli
from flashmoe_build.emulation.build import CSRC, Options
from flashmoe_build.emulation.cases import kernels, matching
from flashmoe_build.emulation.changed import Changes, find_changes, quick_cases, variants
from flashmoe_build.emulation.mutation.planted import Mutant, overlay
from flashmoe_tools.report import Verdict, read_report
from flashmoe_tools.tables import load_tables


def git(root: Path, *words: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' sources, committed and pushed."""
    folder = tmp_path_factory.mktemp("changed")
    origin = folder / "origin"
    shutil.copytree(CSRC, origin / "csrc")
    git(origin, "init", "-q", "-b", "main")
    git(origin, "add", "-A")
    git(origin, "commit", "-qm", "sources")
    git(folder, "clone", "-q", str(origin), "clone")
    return folder / "clone"


def no_barrier() -> Options:
    """The forward kernel of sm80 without the barrier between the wait for a tile and the products on it."""
    file, comment = "attention/forward/sm80/forward.cuh", "// tile is complete;"
    mutant = Mutant("no-barrier", "", file, f"ptx::barrier_sync_block();  {comment}", comment, ())
    return Options(overlay=overlay(mutant))


def test_a_header_without_its_barrier_changes_its_family_alone(clone: Path) -> None:
    assert find_changes(root=clone).kernels == ()
    changes = find_changes(options=no_barrier(), root=clone)
    assert changes.base == f"{git(clone, 'rev-parse', '--short=12', 'HEAD')} (upstream)"
    assert {kernel.unit.row.family for kernel in changes.kernels} == {"sm80"}
    operations = ("attention_forward", "attention_varlen_forward", "attention_dropout_forward")
    assert {kernel.unit.row.operation for kernel in changes.kernels} == set(operations)
    all_of = (matching(load_tables(), f"{name}_sm80") for name in operations)
    assert len(changes.kernels) == sum(len(kernels) for kernels in all_of)
    git(clone, "commit", "-q", "--allow-empty", "-m", "ahead of the upstream")
    assert find_changes(options=no_barrier(), root=clone).kernels == changes.kernels


def test_a_row_changes_its_kernel_and_a_table_of_another_schema_all(clone: Path) -> None:
    rows = clone / "csrc" / "attention" / "kernels.toml"
    text = rows.read_text(encoding="utf-8")
    start = text.index("[[attention_combine.sm80]]")
    rows.write_text(text[:start] + text[start:].replace("warps = 4", "warps = 8", 1), encoding="utf-8")
    git(clone, "commit", "-qam", "another row")
    here = find_changes("HEAD", root=clone)
    assert here.base == "HEAD"
    assert {kernel.unit.row.operation for kernel in here.kernels} == {"attention_combine"}
    rows.write_text(text.replace("schema = 1", "schema = 0", 1), encoding="utf-8")
    git(clone, "commit", "-qam", "an old schema")
    assert len(find_changes("HEAD", root=clone).kernels) == len(kernels(load_tables()))
    with pytest.raises(ArgumentError, match="no such commit"):
        find_changes("v0.0.0-none", root=clone)


def test_without_an_upstream_every_kernel_counts_as_changed(tmp_path: Path) -> None:
    assert find_changes(root=tmp_path) == Changes("", kernels(load_tables()))


def test_there_is_one_variant_for_each_way_through_a_source() -> None:
    every = kernels(load_tables())
    chosen = variants(every)
    assert len(chosen) < len(every) / 2
    families = {(kernel.unit.row.operation, kernel.unit.row.family) for kernel in every}
    assert {(one.unit.row.operation, one.unit.row.family) for one in chosen[: len(families)]} == families
    few = list(quick_cases(variants(matching(load_tables(), "attention_forward_sm80"))))
    assert {case.problem.causal for case in few} == {True, False}
    assert not any(case.problem.huge for case in few)


def test_the_quick_form_finds_a_barrier_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the gate runs it, on the kernels whose ring of buffers needs that barrier; the second run has nothing new."""
    options = no_barrier()
    chosen = matching(load_tables(), "attention_forward_sm80_f16_d64")
    monkeypatch.setattr(cli, "find_changes", lambda against: Changes("abc (upstream)", chosen))
    monkeypatch.setattr(cli, "Options", lambda sanitize="": options)
    words = ["--changed", "--quick", "--seconds", "600", "--json", str(tmp_path / "report.json")]
    assert cli.main(words) == ExitCode.FAILED
    printed = capsys.readouterr().out
    assert "race" in printed
    assert (
        f"changed kernels: {len(chosen)} of {len(kernels(load_tables()))} differ from commit abc (upstream)" in printed
    )
    report = read_report(tmp_path / "report.json")
    assert report.verdict is Verdict.FAIL

    monkeypatch.setattr(cli, "stamp", lambda unit, _: tmp_path)  # it exists: every library has passed before
    assert cli.main(words) == ExitCode.OK
    assert [check.name for check in read_report(tmp_path / "report.json").checks] == ["changed kernels"]
