"""Shared by every test run: which flashmoe is tested, GPU tests counted if they cannot run, one report.

Under ``nox -s test`` the installed wheel is tested; ``FLASHMOE_TEST_INSTALLED=1`` stops a run at once that would import the
checkout's ``flashmoe`` instead. ``FLASHMOE_REQUIRE_GPU=1`` makes a run fail in which no GPU test ran.
"""

import ctypes
import functools
import importlib.util
import itertools
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
# Otherwise Inductor compiles and runs a probe of each instruction set that the CPU has, which costs every compiling process seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
MANY_CASES, DRAW_ONE_OF = 6, 4
# Folders from which only a sample of the files runs: they test tools, which kernels, operators and engines do not use.
TOOLS = (
    "audit", "bench", "build", "command", "docs", "doctor", "fuzz", "gate", "launcher", "lock", "mistakes", "nox", "profile", "progress", "release", "report",
    "sanitizer", "smem",
)  # fmt: skip
HEARTBEAT_S = float(os.environ.get("FLASHMOE_TEST_HEARTBEAT_S", "20"))
# flashmoe_build and tests are imported from the checkout; it comes last in the path, so that an installed flashmoe takes precedence.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


@functools.cache
def gpu_count() -> int:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver: torch, which takes seconds to import, would find no GPU either
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.hookimpl(optionalhook=True)  # from pytest-xdist, which may be missing on a machine with a GPU
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The meaning of ``-n auto``: one process if there is a GPU to time, else one per core, as memory allows."""
    from flashmoe_build.compile.jobs import job_count

    processes = 1 if gpu_count() else min(job_count(os.environ), MAX_PROCESSES)
    return processes if processes > 1 else 0  # 0: this process only


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
    """Whether flashmoe._extension.library_path would find a library."""
    places = (package / LIBRARY, package.parent / "build" / "lib" / LIBRARY)
    return bool(os.environ.get("FLASHMOE_LIBRARY")) or any(place.is_file() for place in places)


class Heartbeat:
    """Prints the name of a test that runs for long (a compiler, a build), so that no run is silent for over 30 s."""

    def __init__(self) -> None:
        self._out = os.dup(sys.stderr.fileno())  # before pytest captures output, which includes a test's
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
    if getattr(config, "workerinput", {}).get("workerid", "")[-1:] in [*"13579"] and len(config.args) == 1:
        # pytest rewrites each file's assertions, a third of the collection time, and keeps the bytecode: two processes that start at opposite
        # ends rewrite half of the files each. file_order then gives both the same order.
        inside = (path for path in Path(config.args[0]).glob("[a-z]*") if path.is_dir() or path.match("test_*.py"))
        config.args = sorted(map(str, inside), reverse=True) or config.args
    config.stash[EXCLUDED] = Counter()
    if draw := os.environ.get("FLASHMOE_DRAW"):
        config.pluginmanager.register(Draw(draw, config.stash[EXCLUDED]), "draw")
    if config.getoption("dist", default="no") == "no":  # the process that distributes tests runs none
        config.pluginmanager.register(Heartbeat(), "heartbeat")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``device`` and does not parametrize it runs on the CPU and, marked gpu, on a GPU."""
    own = " ".join(str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "device" in metafunc.fixturenames and "device" not in own:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")


class Draw:
    """Runs a random sample (flashmoe_build/draw.py): one in ``DRAW_ONE_OF`` of the cases of each test with ``MANY_CASES`` or more. Cases with
    the same value of the marker ``together`` are sampled together, and the tests of a file marked ``drawn`` are sampled as if they were cases.
    GPU cases all run; without a GPU one of each test stays, and the others are counted. The files of ``TOOLS`` are sampled at the same rate."""

    def __init__(self, draw: str, counts: Counter[str]) -> None:
        from flashmoe_build.draw import drawn

        self.draw, self.counts = draw, counts
        folder = Path(__file__).parent
        files = {str(path.relative_to(folder)) for tool in TOOLS for path in (folder / tool).glob("test_*.py")}
        # Uses another draw than the cases, otherwise each file would always run the same quarter of its cases.
        self.ignored = {folder / name for name in files - drawn(files, DRAW_ONE_OF, f"files, {draw}")}

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Runs before a module is imported. pytest does not call it for files named on the command line."""
        if collection_path not in self.ignored:
            return None
        self.counts["files"] += 1
        return True

    def taken(self, names: set[str]) -> set[str]:
        from flashmoe_build.draw import drawn

        return drawn(names, DRAW_ONE_OF, self.draw) if len(names) >= MANY_CASES else names

    @pytest.hookimpl(wrapper=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> Iterator[None]:
        """Runs before pytest creates items, each of which costs every process a millisecond."""
        yield
        test, calls = metafunc.definition, metafunc._calls
        together = test.get_closest_marker("together")
        gpu, names = [], {}
        for call in calls:
            if test.get_closest_marker("gpu") or any(mark.name == "gpu" for mark in call.marks):
                gpu.append(call)
            elif together:
                names[call.id] = str(together.args[0](*(call.params[word] for word in together.args[1:])))
            else:
                names[call.id] = f"{test.nodeid}[{call.id}]"
        taken = self.taken(set(names.values()))
        staying = 1 if len(gpu) == len(calls) else 0  # without any case pytest would make a test without parameters
        out_of_reach = [] if gpu_count() else gpu[staying:]
        others = [call for call in calls if call.id in names and names[call.id] not in taken]
        self.counts.update(drawn=len(others), gpu=len(out_of_reach))
        left_out = {call.id for call in [*others, *out_of_reach]}
        calls[:] = [call for call in calls if call.id not in left_out]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        files = defaultdict[Path, set[str]](set)
        for item in items:
            if item.get_closest_marker("drawn") and not hasattr(item, "callspec"):
                files[item.path].add(item.nodeid)
        left_out = {name for names in files.values() for name in names - self.taken(names)}
        items[:] = [item for item in items if item.nodeid not in left_out]
        self.counts["drawn"] += len(left_out)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = dict(self.counts)


@pytest.hookimpl(trylast=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    item.stash[POSITION] = next(POSITIONS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=file_order(items))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and gpu_count() == 0:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Every process leaves out the same tests."""
    node.config.stash[EXCLUDED] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def file_order(items: list[pytest.Item]) -> Callable[[pytest.Item], tuple[bool, int, Path, int]]:
    """Files with a slow test first, then the others by their number of tests, so that no long file starts when the other processes end."""
    sizes = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    return lambda item: (item.path not in slow, -sizes[item.path], item.path, item.stash[POSITION])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints the first of several failures with the same cause in full, and one line for each of the others."""
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
    counted = config.stash[EXCLUDED]
    left_out, without_gpu = counted["drawn"], len(not_run) + counted["gpu"]
    if without_gpu:
        terminalreporter.write_line(f"GPU: {without_gpu} tests did not run: this machine has no CUDA GPU")
    elif ran:
        terminalreporter.write_line(f"GPU: {ran} tests ran")
    if left_out:
        terminalreporter.write_line(
            f"DRAWN: {left_out} cases and {counted['files']} files were not sampled for this commit (FLASHMOE_DRAW); ./nox -s test runs all"
        )
    if os.environ.get("FLASHMOE_TEST_REPORT"):
        elapsed = time.monotonic() - config.stash[STARTED]
        write_report(Path(os.environ["FLASHMOE_TEST_REPORT"]), counts, ran, without_gpu, left_out, elapsed)


def skip_reason(report: pytest.TestReport) -> str:
    """The reason without file and line, so that equal reasons are counted together."""
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput"):  # only the process that distributes tests reports it
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
EXCLUDED = pytest.StashKey[Counter[str]]()  # cases by the reason why they were left out: "drawn", "gpu"
POSITION, POSITIONS = pytest.StashKey[int](), itertools.count()  # position of an item in its file
CAUSES: defaultdict[tuple[str, int, str], list[str]] = defaultdict(list)  # tests by place and message of failure
