"""Runs a mutant's kernels on the emulated machine until something fails."""

import multiprocessing
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

from flashmoe.errors import BuildError
from flashmoe_build.emulation.build import Options, kernel_library
from flashmoe_build.emulation.cases import Case, Kernel, kernels, run_case, suite
from flashmoe_build.emulation.mutation.planted import Mutant, overlay
from flashmoe_build.emulation.runner import TensorMapError
from flashmoe_tools.tables import load_tables

MOST_KERNELS = 8  # a bug by rule has survived if this many kernels whose code it changed have not noticed it
CASE_SECONDS = 240  # a longer case hangs; all cases of a survivor together may take much longer

# Workers are forks of a server that has imported torch once.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["flashmoe_build.emulation.cases"])

NOT_COMPILED = "does not compile"
SAME_CODE = "same code"


@dataclass(frozen=True)
class Kill:
    """The suite's verdict on a mutant.

    ``by`` is the kind of failure, "wrong result", "crash" or "timeout"; "" if it survived; NOT_COMPILED; or SAME_CODE
    if every kernel compiles to the same code as without the bug, so that there is nothing to notice.
    """

    name: str
    by: str
    detail: str
    case: str
    runs: int
    seconds: float

    @property
    def killed(self) -> bool:
        return self.by not in ("", NOT_COMPILED, SAME_CODE)

    @property
    def survived(self) -> bool:
        return self.by == ""


@lru_cache(maxsize=512)
def _kernels(name: str) -> tuple[Kernel, ...]:
    """The kernels with that label or unit name."""
    return tuple(kernel for kernel in kernels(load_tables()) if name in (kernel.label, kernel.unit.name))


def _cases(kernel: Kernel) -> tuple[Case, ...]:
    return tuple(case for case in suite(load_tables(), kernel.label, whole=True) if case.kernel.label == kernel.label)


def changed_kernels(mutant: Mutant, tell: Callable[[], None] = lambda: None) -> Iterator[Kernel]:
    """The mutant's kernels whose code differs from that without the bug; compiles both. ``tell`` is called as each begins."""
    options = Options(overlay=overlay(mutant))
    for name in mutant.kernels:
        for kernel in _kernels(name):
            tell()
            if mutant.at is None or mutant.fast or _code(kernel_library(kernel.unit, options)) != _code(_plain(kernel)):
                yield kernel


def _plain(kernel: Kernel) -> Path:
    return kernel_library(kernel.unit, Options())


def _code(library: Path) -> bytes:
    """The library's code, without symbols and source names."""
    with tempfile.TemporaryDirectory(prefix="flashmoe-code-") as folder:
        output = Path(folder) / "code"
        command = ["strip", "--strip-all", "--remove-section=.note.gnu.build-id", "-o", str(output), str(library)]
        subprocess.run(command, check=True, capture_output=True)
        return output.read_bytes()


def hunt(mutant: Mutant, tell: Callable[[int], None] = lambda runs: None) -> Kill:
    """Runs cases until one fails, kernel by kernel, then all again with further seeds; ``tell`` is called as each begins."""
    begin = time.monotonic()
    options = Options(overlay=overlay(mutant))
    runs = 0

    def result(by: str, detail: str = "", case: str = "") -> Kill:
        return Kill(mutant.name, by, detail, case, runs, time.monotonic() - begin)

    def still_alive() -> None:
        tell(runs)

    tried: list[Case] = []
    try:
        for case in _in_turn(mutant, tried, still_alive):
            runs += 1
            tell(runs)
            try:
                outcome = run_case(case, options)
            except TensorMapError as error:
                return result("refused map", str(error), case.identity)
            if not outcome.passed:
                failure = outcome.report.failure
                by = "wrong result" if failure is None else failure.kind
                return result(by, outcome.explain()[:500], case.identity)
    except BuildError as error:
        return result(NOT_COMPILED, str(error)[:2000])
    return result("" if tried else SAME_CODE)


def _in_turn(mutant: Mutant, tried: list[Case], tell: Callable[[], None]) -> Iterator[Case]:
    changed = changed_kernels(mutant, tell)
    for kernel in changed if mutant.at is None else islice(changed, MOST_KERNELS):
        cases = _cases(kernel)
        tried.extend(cases)
        yield from cases
    for extra in range(1, mutant.seeds + 1):
        yield from (replace(case, seed=case.seed + 100 * extra) for case in tuple(tried))


def _report(mutant: Mutant, channel: Connection) -> None:
    channel.send(hunt(mutant, channel.send))


def hunt_in_process(mutant: Mutant, end: float = float("inf")) -> Kill | None:
    """``hunt`` in a separate process, because a mutant may crash it or never end. None if the time ``end`` came first."""
    begin = time.monotonic()
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_report, args=(mutant, sender))
    process.start()
    sender.close()
    runs = 0
    try:
        while receiver.poll(max(0.0, min(CASE_SECONDS, end - time.monotonic()))):
            message: int | Kill = receiver.recv()
            if isinstance(message, Kill):
                return message
            runs = message
        if time.monotonic() >= end:
            return None
        detail = f"no end of a case within {CASE_SECONDS} s"
        return Kill(mutant.name, "timeout", detail, "", runs, time.monotonic() - begin)
    except EOFError:
        process.join()
        return Kill(mutant.name, "crash", f"exit status {process.exitcode}", "", runs, time.monotonic() - begin)
    finally:
        process.kill()
        process.join()
