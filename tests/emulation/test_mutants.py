"""The suite finds planted bugs. All of them: ``python -m flashmoe_build.emulation.mutants`` (docs/results/2026-11-23-cpu/mutations.json)."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

import pytest

from flashmoe.errors import TableError
from flashmoe_build.emulation import mutants
from flashmoe_build.emulation.mutants import Kill, Mutant, anchor_pattern, hunt, load_mutants, markdown, patched
from flashmoe_tools.tables import load_tables

MUTANTS = load_mutants()
FAST = [mutant for mutant in MUTANTS if mutant.fast]


def test_there_are_enough_and_every_family_has_some() -> None:
    assert len(MUTANTS) >= 150
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    units = {unit.name: unit.row.family for unit in load_tables().units()}
    assert {units[name] for mutant in MUTANTS for name in mutant.kernels} == set(units.values())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_anchor_stands_exactly_once(mutant: Mutant) -> None:
    assert patched(mutant).count(mutant.replacement) >= 1
    known = {unit.name for unit in load_tables().units()}
    assert set(mutant.kernels) <= known


def test_white_space_does_not_matter() -> None:
    assert anchor_pattern("f(a,\n  b); // why").search("x = f(\n    a, b);  // why")
    assert not anchor_pattern("f(a, b);").search("f(a, c);")


def test_a_stale_anchor_is_an_error() -> None:
    stale = Mutant("stale", "", "attention/forward/tile.cuh", "this text is not in the file", "", ("x",))
    with pytest.raises(TableError, match="stands 0 times"):
        patched(stale)


@pytest.mark.parametrize("mutant", FAST, ids=lambda mutant: mutant.name)
def test_bug_is_found(mutant: Mutant) -> None:
    kill = hunt(mutant)
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

    monkeypatch.setattr(mutants, "CONTEXT", multiprocessing.get_context("fork"))
    monkeypatch.setattr(mutants, "CASE_SECONDS", 1.5)
    monkeypatch.setattr(mutants, "hunt", slow)
    kill = mutants.hunt_in_process(FAST[0])
    assert (kill.by, kill.runs) == (by, 1 if by else 3)


def test_a_survivor_is_not_called_killed() -> None:
    assert not Kill("a", "", "", "", 9, 1.0).killed
    assert not Kill("a", "does not compile", "", "", 1, 1.0).killed
    assert "**survived**" in markdown([FAST[0]], [Kill(FAST[0].name, "", "", "", 9, 1.0)])
