"""What every test run shares: which flashmoe is under test, GPU tests counted when they cannot run, one report.

Under ``nox -s test`` the installed wheel is tested; ``FLASHMOE_TEST_INSTALLED=1`` makes a run that would import the
checkout's ``flashmoe`` instead stop at once. ``FLASHMOE_REQUIRE_GPU=1`` makes a run in which no GPU test ran a failure.
"""

import ctypes
import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "libflashmoe.so"
NO_GPU = "needs a CUDA GPU"
MAX_PROCESSES = 8  # more would only wait for the longest file, a fifth of the suite's time
# Inductor else compiles and runs a probe of each instruction set that the CPU names, seconds of every process that compiles.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
MANY_CASES, DRAW_ONE_OF = 6, 4
HEARTBEAT_S = float(os.environ.get("FLASHMOE_TEST_HEARTBEAT_S", "20"))
# flashmoe_build and tests are imported from the checkout; at the end of the path, so that an installed flashmoe wins.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


def gpu_count() -> int:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver: torch, which takes seconds to import, would find no GPU either
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which a machine with a GPU may lack
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What ``-n auto`` means: one process where a GPU is timed, else one a core, as far as memory goes."""
    from flashmoe_build.compile.jobs import job_count

    processes = 1 if gpu_count() else min(job_count(os.environ), MAX_PROCESSES)
    return processes if processes > 1 else 0  # 0: this one


def pytest_sessionstart(session: pytest.Session) -> None:
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # started in the background: programs under test would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    session.config.stash[STARTED] = time.monotonic()
    spec = importlib.util.find_spec("flashmoe")
    origin = "" if spec is None or spec.origin is None else spec.origin
    if os.environ.get("FLASHMOE_TEST_INSTALLED") == "1" and "site-packages" not in Path(origin).parts:
        pytest.exit(f"the installed flashmoe is meant to be tested, but {origin or 'none'} would be imported", 2)
    installed = [path for path in sys.path if (Path(path) / "flashmoe" / LIBRARY).is_file()]
    if origin and installed and not has_library(Path(origin).parent):
        msg = f"{origin}, a source tree without a built library, would be imported in front of the flashmoe installed in {installed[0]}"
        pytest.exit(f"{msg}: start from another folder, or with `python -P`", 2)


def has_library(package: Path) -> bool:
    """Whether flashmoe._extension.library_path would find one."""
    places = (package / LIBRARY, package.parent / "build" / "lib" / LIBRARY)
    return bool(os.environ.get("FLASHMOE_LIBRARY")) or any(place.is_file() for place in places)


class Heartbeat:
    """Names the test that runs for long (a compiler, a build), so that no run is silent for over 30 s."""

    def __init__(self) -> None:
        self._out = os.dup(sys.stderr.fileno())  # while nothing is captured; a test's own output is
        self._running = ("the collection of the tests", time.monotonic())
        self._end = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT_S / 4):
            name, spoke = self._running
            if name and time.monotonic() - spoke >= HEARTBEAT_S:
                os.write(self._out, f"\n... {name} is still running\n".encode())
                self._running = (name, time.monotonic())

    def pytest_collection_finish(self) -> None:
        self._running = ("", 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._running = (item.nodeid, time.monotonic())
        try:
            return (yield)
        finally:
            self._running = ("", 0.0)

    def pytest_unconfigure(self) -> None:
        self._end.set()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", default="no") == "no":  # who spreads the tests over processes runs none
        config.pluginmanager.register(Heartbeat(), "heartbeat")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``device`` and names none runs on the CPU and, marked gpu, on a GPU."""
    own = " ".join(str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "device" in metafunc.fixturenames and "device" not in own:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if draw := os.environ.get("FLASHMOE_DRAW"):
        left_out = not_drawn(items, draw)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = len(left_out)
        config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=file_order(items))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and gpu_count() == 0:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def not_drawn(items: list[pytest.Item], draw: str) -> set[pytest.Item]:
    """Of each test with ``MANY_CASES`` cases or more all but one in ``DRAW_ONE_OF`` (flashmoe_build/draw.py). Cases for which the
    marker ``together`` gives the same are drawn together, and the tests of a file marked ``drawn`` are those of one. A GPU's
    tests are never left out."""
    from flashmoe_build.draw import drawn

    tests = defaultdict[str, dict[str, list[pytest.Item]]](lambda: defaultdict(list))
    for item in items:
        case = getattr(item, "callspec", None)
        if case is not None and not item.get_closest_marker("gpu"):
            together = item.get_closest_marker("together")
            name = together.args[0](*(case.params[word] for word in together.args[1:])) if together else item.nodeid
            tests[item.nodeid.partition("[")[0]][str(name)].append(item)
        elif item.get_closest_marker("drawn"):
            tests[str(item.path)][item.nodeid].append(item)
    left_out: set[pytest.Item] = set()
    for cases in tests.values():
        if len(cases) >= MANY_CASES:
            taken = drawn(cases, DRAW_ONE_OF, draw)
            left_out.update(item for name, same in cases.items() if name not in taken for item in same)
    return left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Each process leaves out the same."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def file_order(items: list[pytest.Item]) -> Callable[[pytest.Item], tuple[bool, int, Path]]:
    """Files with a slow test, then the others by their number of tests: none that is long is begun when the other processes end."""
    sizes = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    return lambda item: (item.path not in slow, -sizes[item.path], item.path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of failures of one cause the first is printed whole, the others in a line: sixty of one cause are one to read."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if not report.failed or crash is None:
        return
    message = crash.message.splitlines()[0] if crash.message else ""
    cause = (crash.path, crash.lineno, re.sub(r"\d+", "#", message))
    CAUSES[cause].append(report.nodeid)
    if len(CAUSES[cause]) > 1:
        report.longrepr = f"as {CAUSES[cause][0]}: {message[:200]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    counts = {key: len(stats.get(key, [])) for key in ("passed", "failed", "error", "skipped", "xfailed")}
    not_run = [item for item in stats.get("skipped", []) if NO_GPU in str(item.longrepr)]
    others = [item for item in stats.get("skipped", []) if item not in not_run]
    for reason, number in sorted(Counter(skip_reason(item) for item in others).items()):
        terminalreporter.write_line(f"SKIP: {number} not run: {reason}")
    ran = sum("gpu" in item.keywords for key in ("passed", "failed") for item in stats.get(key, []))
    for nodes in CAUSES.values():
        if len(nodes) > 1:
            terminalreporter.write_line(f"{len(nodes)} failures of one cause: {nodes[0]}")
    if not_run:
        terminalreporter.write_line(f"GPU: {len(not_run)} tests did not run: this machine has no CUDA GPU")
    elif ran:
        terminalreporter.write_line(f"GPU: {ran} tests ran")
    left_out = config.stash.get(LEFT_OUT, 0)
    if left_out:
        terminalreporter.write_line(
            f"DRAWN: {left_out} cases are other commits' (FLASHMOE_DRAW); ./nox -s test alone runs all"
        )
    if os.environ.get("FLASHMOE_TEST_REPORT"):
        elapsed = time.monotonic() - config.stash[STARTED]
        write_report(Path(os.environ["FLASHMOE_TEST_REPORT"]), counts, ran, len(not_run), left_out, elapsed)


def skip_reason(report: pytest.TestReport) -> str:
    """Without the file and line in front, so that equal reasons are counted together."""
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput"):  # the process that spread the tests says it, once
        return
    if os.environ.get("FLASHMOE_REQUIRE_GPU") == "1" and exitstatus == 0 and gpu_count() == 0:
        print("\nFLASHMOE_REQUIRE_GPU=1, but this machine has no CUDA GPU: no GPU test ran", file=sys.stderr)
        session.exitstatus = 1


def write_report(
    path: Path, counts: dict[str, int], gpu_ran: int, gpu_not_run: int, left_out: int, seconds: float
) -> None:
    from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now
    from flashmoe_tools.report import write_report as write

    bad = counts["failed"] + counts["error"]
    verdict = Verdict.FAIL if bad else Verdict.PASS if counts["passed"] else Verdict.SKIP
    found = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    checks = (
        Check("tests", verdict, found or "no test ran", "all pass", next_step="nox -s test -- --lf" if bad else ""),
        Check("tests on a GPU", Verdict.PASS if gpu_ran else Verdict.SKIP, f"{gpu_ran} ran, {gpu_not_run} did not"),
    )
    data = {**counts, "gpu_ran": gpu_ran, "gpu_not_run": gpu_not_run, "left_out": left_out}
    write(path, Report("test", checks, data, host_environment(), ("pytest",), utc_now(), round(seconds, 1)))


STARTED = pytest.StashKey[float]()
LEFT_OUT = pytest.StashKey[int]()
CAUSES: defaultdict[tuple[str, int, str], list[str]] = defaultdict(list)  # tests by where and how they failed
