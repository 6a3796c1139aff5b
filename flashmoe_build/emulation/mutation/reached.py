"""Which tests reach which lines: a pytest plugin that records it, and the selection that a hunt makes from it.

python -m pytest -p flashmoe_build.emulation.mutation.reached TESTS    with MUTANTS_REACHED="FILE PATTERN ..."

Lines run in other processes are not recorded, and a fixture that several tests share counts only for the first: a test that is not listed
may still notice a bug.
"""

import json
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest

VARIABLE = "MUTANTS_REACHED"


def command(oracle: str, out: Path, patterns: Sequence[str]) -> str:
    """The oracle, with this plugin."""
    given = shlex.quote(f"{out} {' '.join(patterns)}")
    return f"{VARIABLE}={given} {oracle} -p flashmoe_build.emulation.mutation.reached"


def first(table: Mapping[str, Any], file: str, lines: Iterable[int], seconds: float) -> list[str]:
    """The tests that reach one of the lines, shortest first, as many as fit into ``seconds``."""
    own = table["files"].get(file, {})
    chosen = sorted(
        {test for line in lines for test in own.get(str(line), ())}, key=lambda test: table["tests"][test][1]
    )
    names: list[str] = []
    for test in chosen:
        name, its_seconds = table["tests"][test]
        seconds -= its_seconds
        if seconds < 0 and names:
            break
        names.append(name)
    return names


def pytest_configure(config: pytest.Config) -> None:
    if VARIABLE in os.environ:
        out, *patterns = os.environ[VARIABLE].split()
        config.pluginmanager.register(_Watch(Path(out), patterns))


class _Watch:
    def __init__(self, out: Path, patterns: Sequence[str]) -> None:
        self._out, self._tests = out, dict[str, float]()
        self._coverage = coverage.Coverage(data_file=None, include=list(patterns), config_file=False)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        name, begin = item.nodeid.split("[", 1)[0], time.monotonic()
        self._coverage.switch_context(name)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")
            self._tests[name] = self._tests.get(name, 0.0) + time.monotonic() - begin

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data, numbers = self._coverage.get_data(), {name: number for number, name in enumerate(self._tests)}
        files = {
            os.path.relpath(file): {
                line: sorted(numbers[name] for name in names if name)
                for line, names in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        tests = [[name, round(seconds, 3)] for name, seconds in self._tests.items()]
        part = self._out.with_suffix(".part")
        part.write_text(json.dumps({"tests": tests, "files": files}), encoding="utf-8")
        part.replace(self._out)
