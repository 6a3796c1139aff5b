"""The suite finds planted bugs. All of them: ``python -m flashmoe_build.emulation.mutants``."""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashmoe.errors import ExitCode, TableError
from flashmoe_build.emulation import mutants
from flashmoe_build.emulation.mutation import generate, hunt, reached, record, repository
from flashmoe_build.emulation.mutation.hunt import NOT_COMPILED, SAME_CODE, Kill
from flashmoe_build.emulation.mutation.operators import edits
from flashmoe_build.emulation.mutation.planted import Mutant, anchor_pattern, load_mutants, patched
from flashmoe_build.emulation.mutation.source import Source
from flashmoe_tools.report import Verdict, write_report
from flashmoe_tools.tables import load_tables

BY_HAND = load_mutants()
UNITS = {unit.name: unit.row.family for unit in load_tables().units()}
FAST, ROWS = [mutant for mutant in BY_HAND if mutant.fast], generate.fast()  # making the rows' mutants takes seconds
SOURCE = """
namespace flashmoe {
template <typename Spec>
struct Loader {
  __device__ __forceinline__ void load(const Params& params, int64_t row) const {
    if (row >= params.rows && row < kLimit) return;
#pragma unroll
    for (int i = 0; i < Spec::kSteps; ++i) {
      copy<Spec>(smem + i * 16, gmem + row * params.pitch, row < params.rows - 1 ? 16 : 0);
    }
    ptx::cp_async_wait<Spec::kStages - 2>();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(full);
  }
};
}  // namespace flashmoe
"""


def test_there_are_enough_by_hand_and_every_family_has_some() -> None:
    assert len(BY_HAND) >= 150
    assert len({mutant.name for mutant in BY_HAND}) == len(BY_HAND)
    assert {UNITS[name] for mutant in BY_HAND for name in mutant.kernels} == set(UNITS.values())
    kernels = [*(name for mutant in FAST for name in mutant.kernels), *(row["kernel"] for row in ROWS)]
    assert {name.split("_sm")[0] for name in kernels} >= {
        *("attention_forward", "attention_varlen_forward", "attention_combine", "attention_backward_dq"),
        *("attention_backward_dkv", "moe_route", "moe_sort", "grouped_gemm", "grouped_gemm_gated_backward"),
    }


@pytest.mark.parametrize("mutant", BY_HAND, ids=lambda mutant: mutant.name)
def test_anchor_stands_exactly_once(mutant: Mutant) -> None:
    assert patched(mutant).count(mutant.replacement) >= 1
    assert set(mutant.kernels) <= UNITS.keys()


def test_white_space_does_not_matter() -> None:
    assert anchor_pattern("f(a,\n  b); // why").search("x = f(\n    a, b);  // why")
    assert not anchor_pattern("f(a, b);").search("f(a, c);")


def test_a_stale_anchor_is_an_error() -> None:
    stale = Mutant("stale", "", "attention/forward/tile.cuh", "this text is not in the file", "", ("x",))
    with pytest.raises(TableError, match="occurs 0 times"):
        patched(stale)


def test_rules_make_what_they_say() -> None:
    source = Source(SOURCE)
    (function,) = source.functions
    assert function.name == "Loader.load"
    made = {(edit.operator, SOURCE[edit.start : edit.end], edit.replacement) for edit in edits(source, function)}
    assert made >= {
        ("remove-exit", "if (row >= params.rows && row < kLimit) return;", ""),
        ("drop-predicate", "row >= params.rows && row < kLimit", "row < kLimit"),
        ("boundary", "row >= params.rows", "row > params.rows"),
        ("boundary", "row < params.rows - 1", "row <= params.rows - 1"),
        ("drop-operand", "params.rows - 1", "params.rows"),
        ("one-more", "params.rows - 1", "params.rows - 2"),
        (
            "narrow",
            "row * params.pitch",
            "static_cast<int>(static_cast<unsigned>(row) * static_cast<unsigned>(params.pitch))",
        ),
        ("choose-second", "row < params.rows - 1 ? 16 : 0", "0"),
        ("wait-late", "Spec::kStages - 2", "Spec::kStages - 1"),
        ("remove-call", "ptx::cp_async_wait<Spec::kStages - 2>();", ""),
        ("remove-call", "if (ptx::lane_index() == 0) ptx::mbarrier_arrive(full);", ""),
        ("condition-true", "ptx::lane_index() == 0", "true"),
    }
    assert not any(
        edit[0] == "boundary" and "kSteps" in edit[1] for edit in made
    )  # loops over registers keep their end
    text = "int most(int a, int b) { return a > b ? a : b; }\nint one(int a, int b) { return a > b ? a : 0; }\n"
    largest, other = (
        [edit.what for edit in edits(Source(text), function) if edit.operator == "boundary"]
        for function in Source(text).functions
    )
    assert (largest, len(other)) == ([], 1)  # of two equal numbers either is the largest


def test_generated_names_are_unique_and_every_one_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    every, chosen = generate.generated(every=True), generate.generated()
    names = {mutant.name for mutant in every}
    assert len(names) == len(every)
    assert {mutant.name for mutant in chosen} <= names
    assert 600 <= len(chosen) <= 2500
    for mutant in chosen:
        assert patched(mutant)
        assert mutant.kernels
    monkeypatch.setattr(generate, "equivalents", tuple)  # in a short file all that are chosen may be equivalent
    assert {mutant.file for mutant in generate.generated.__wrapped__()} >= {mutant.file for mutant in every}


def test_equivalent_ones_exist_and_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    equivalent = generate.equivalents()
    monkeypatch.setattr(generate, "equivalents", tuple)
    every = generate.generated.__wrapped__(every=True)
    stale = [row for row in equivalent if not any(row.covers(mutant) for mutant in every)]
    assert stale == []
    assert all(len(row.why.split()) > 3 for row in equivalent)


def test_a_hunt_that_ends_early_has_been_in_every_file() -> None:
    chosen = generate.generated()
    files = {mutant.file for mutant in chosen}
    assert {mutant.file for mutant in mutants.round_robin(chosen)[: len(files)]} == files


def name_of(bug: Mutant | dict[str, Any]) -> str:
    return bug.name if isinstance(bug, Mutant) else f"{bug['file']}:{bug['operator']}:{bug['kernel']}"


@pytest.mark.parametrize("bug", [*FAST, *ROWS], ids=name_of)
def test_bug_is_found(bug: Mutant | dict[str, Any]) -> None:
    mutant = bug if isinstance(bug, Mutant) else generate.first(bug)
    kill = hunt.hunt(mutant)
    assert kill.killed, f"{mutant.what}: survived {kill.runs} runs; {kill.by} {kill.detail}"


@pytest.mark.parametrize(("seconds", "by"), [(0.6, ""), (60.0, "timeout")])
def test_a_case_that_hangs_is_a_kill_and_a_long_suite_is_none(
    seconds: float, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(mutant: Mutant, tell: Callable[[int], None]) -> Kill:
        for runs in (1, 2, 3):
            tell(runs)
            time.sleep(seconds)
        return Kill(mutant.name, "", "", "", 3, 3 * seconds)

    monkeypatch.setattr(hunt, "CONTEXT", multiprocessing.get_context("fork"))
    monkeypatch.setattr(hunt, "CASE_SECONDS", 1.5)
    monkeypatch.setattr(hunt, "hunt", slow)
    kill = hunt.hunt_in_process(FAST[0])
    assert kill is not None
    assert (kill.by, kill.runs) == (by, 1 if by else 3)
    if by:
        assert hunt.hunt_in_process(FAST[0], time.monotonic() + 0.5) is None  # the budget ends before the case does


def test_a_survivor_is_not_called_killed() -> None:
    for by in ("", NOT_COMPILED, SAME_CODE):
        assert not Kill("a", by, "", "", 9, 1.0).killed
    hand, rule = FAST[0], generate.generated()[0]
    survived = {mutant.name: Kill(mutant.name, "", "", "", 9, 1.0) for mutant in (hand, rule)}
    assert "**survived**" in record.markdown([hand], survived)
    assert record.report([hand, rule], survived, "", 1.0).verdict is Verdict.FAIL
    same = {rule.name: Kill(rule.name, SAME_CODE, "", "", 0, 1.0)}
    assert record.report([rule], same, "", 1.0).checks[0].verdict is Verdict.SKIP


def test_a_hunt_goes_on_from_its_report_where_the_patch_is_the_same(tmp_path: Path) -> None:
    first, second, *_ = generate.generated()
    kills = {mutant.name: Kill(mutant.name, "race", "", "case", 1, 1.0) for mutant in (first, second)}
    write_report(tmp_path / "hunt.json", record.report([first, second], kills, "", 2.0))
    changed = Mutant(second.name, second.what, second.file, second.anchor, "other", second.kernels, at=second.at)
    assert set(record.read(tmp_path / "hunt.json", [first, changed])) == {first.name}
    assert record.read(tmp_path / "none.json", [first]) == {}


def test_a_command_judges_bugs_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The judge notices that a check is gone, but not that its limit has moved."""
    source = "def check(rows):\n    if rows < 0 and rows != -1:\n        raise ValueError(rows)\n"

    def copy(target: Path) -> None:
        (target / "rule.py").write_text(source, encoding="utf-8")

    monkeypatch.setattr(repository, "copy_checkout", copy)
    judge = "import rule\ntry: rule.check(-2)\nexcept ValueError: rule.check(1)\nelse: exit(1)"
    words = ["rule.py", "--oracle", f"{sys.executable} -B -c '{judge}'"]
    assert repository.main(words) == ExitCode.FAILED
    printed = capsys.readouterr().out
    for line in ("killed rule.py line 3: remove-raise", "killed rule.py line 2: condition-true"):
        assert line in printed
    assert "SURVIVED rule.py line 2: boundary: rows < 0" in printed
    assert "SURVIVED rule.py line 2: drop-predicate: rows != -1, of rows < 0 and rows != -1" in printed
    assert repository.main(["rule.py", "--oracle", "false"]) == ExitCode.USAGE


def test_a_bug_that_nothing_can_notice_is_not_drawn(tmp_path: Path) -> None:
    (tmp_path / "rule.py").write_text("a = 1 + 1\nb = 2 - 1\n", encoding="utf-8")
    folder, reasons = repository.Folder("rules", ("rule.py",), ""), repository.Reasons()
    reasons["rule.py", "drop-operand: 1 + 1"] = "why"
    drawn = repository.sites_of(tmp_path, folder, 0, 0, reasons)
    assert [edit.what for _, _, edit in drawn] == ["line 2: drop-operand: 2 - 1"]
    _, reasons = repository.folders()
    for name, functions in reasons.choices.items():  # each exists, and leaving it out leaves out nothing else
        path = repository.REPOSITORY / name
        source = Source(path.read_text(encoding="utf-8"))
        own = [edit for one in source.functions if one.name in functions for edit in edits(source, one)]
        assert {one.name for one in source.functions} >= set(functions)
        assert len(own) > 0
        assert len(repository.edits_of(path)) - len(repository.edits_of(path, functions)) == len(own)


def test_sources_that_do_not_compile_anyway_judge_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(repository, "copy_checkout", lambda target: (target / "rule.py").write_text("a = 1 + 1\n"))
    monkeypatch.setattr(repository.Folder, "make", "false")
    folder = repository.Folder("rules", ("rule.py",), "", build=True)
    monkeypatch.setattr(repository, "folders", lambda: ((folder,), repository.Reasons()))
    assert repository.main(["--json", str(tmp_path / "found.json")]) == ExitCode.USAGE
    assert capsys.readouterr().out == "rules: it does not compile without a bug: false\n"
    assert not (tmp_path / "found.json").exists()


def test_what_reaches_a_bug_is_asked_first_and_what_fails_anyway_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def check(rows):\n    if rows < 0:\n        raise ValueError(rows)\n\ndef other():\n    return 1 + 1\n"
    tests = (
        "import pytest, rule\n"
        "def test_anyway(): assert rule.other() == 3\n"
        "def test_nothing(): pass\n"
        "@pytest.mark.parametrize('rows', [0, 1])\ndef test_check(rows): rule.check(rows)\n"
        "def test_raises():\n    with pytest.raises(ValueError): rule.check(-1)\n"
    )

    def copy(target: Path) -> None:
        (target / "rule.py").write_text(source, encoding="utf-8")
        (target / "test_rule.py").write_text(tests, encoding="utf-8")

    monkeypatch.setattr(repository, "copy_checkout", copy)
    folder = repository.Folder("rules", ("rule.py",), "test_rule.py")
    monkeypatch.setattr(repository, "folders", lambda: ((folder,), repository.Reasons()))
    monkeypatch.setenv("PYTHONPATH", str(Path(repository.__file__).parents[3]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second of each of nine runs
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    words = ["--most", "0", "--reached", str(tmp_path), "--json", str(tmp_path / "found.json")]
    assert repository.main(words) == ExitCode.FAILED
    printed = capsys.readouterr().out
    assert printed.count("ignored, because they fail without a bug: test_rule.py::test_anyway") == 1
    assert "rules: 4 of 5 killed" in printed
    assert "survived: rule.py line 6: drop-operand: 1 + 1" in printed
    table = json.loads((tmp_path / "rules.json").read_text(encoding="utf-8"))
    asked = reached.first(table, "rule.py", [3], 60.0)
    assert asked == ["test_rule.py::test_raises"]
    assert set(reached.first(table, "rule.py", [2, 3], 60.0)) == {
        "test_rule.py::test_check",
        "test_rule.py::test_raises",
    }
    assert len(reached.first(table, "rule.py", [2, 3], 0.0)) == 1
    assert reached.first(table, "rule.py", [4], 60.0) == reached.first(table, "none.py", [1], 60.0) == []
    assert repository.main(words) == ExitCode.FAILED  # from the report, with nothing left to hunt
    assert "killed" not in capsys.readouterr().out.split("rules: 4 of 5 killed")[0]
