"""The nox sessions. Each prepares an environment and calls the one program that does the work.

./nox                    emulation of what changed, build, symbols, smoke, baseline; ends with one table
./nox -s test            build, install the wheel, run the tests against it
./nox -s SESSION -- ...  arguments after -- go to the program (-- --help)
"""

from __future__ import annotations

import itertools
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from flashmoe._version import WHEEL_PREFIX  # noqa: E402
from flashmoe.errors import LockError  # noqa: E402
from flashmoe_build.environments import environment  # noqa: E402

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["main"]
nox.options.default_venv_backend = "none"
nox.options.error_on_missing_interpreters = True

REPORTS = ROOT / "build" / "reports"
INTERRUPT_SECONDS = 20.0
MACHINE = platform.machine()
WHEEL_VARIABLE = "FLASHMOE_WHEEL"
MAIN = "emulation,build,symbols,smoke,baseline"  # steps of flashmoe_build/gate/steps.py


def locked(session: nox.Session, name: str) -> str:
    """The interpreter of a locked environment."""
    try:
        return str(environment.prepare(name))
    except LockError as error:
        session.error(f"LockError: {error}")


def program(session: nox.Session, python: str, module: str, *arguments: str | Path) -> None:
    """Run one module from the checkout. After Ctrl-C it has time to write its results; nox by default allows 0.3 s."""
    words = (python, "-m", module, *map(str, arguments))
    session.run(*words, external=True, interrupt_timeout=INTERRUPT_SECONDS, terminate_timeout=INTERRUPT_SECONDS)


def wheel_file(session: nox.Session) -> Path:
    """The wheel under test: ``FLASHMOE_WHEEL``, or one built now (seconds if nothing changed)."""
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        path = Path(session.invoked_from, given).resolve()
        if not path.is_file():
            session.error(f"{WHEEL_VARIABLE}={given}: there is no such file")
        return path
    run_build(session)
    return newest_wheel(session)


def newest_wheel(session: nox.Session) -> Path:
    wheels = sorted((ROOT / "dist").glob(f"{WHEEL_PREFIX}*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        session.error("dist/ contains no wheel; run ./nox -s build")
    return wheels[-1]


def installed(session: nox.Session, wheel: Path) -> str:
    """The interpreter of the test environment, with this wheel installed."""
    python = locked(session, "test")
    try:
        environment.install_wheel(Path(python), wheel)
    except LockError as error:
        session.error(f"LockError: {error}")
    return python


def outside(name: str) -> Path:
    """A folder to run the installed package from, where the checkout's flashmoe/ cannot shadow it."""
    folder = ROOT / "build" / "run" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def asks_for_help(session: nox.Session) -> bool:
    """Whether the session is called for help, which needs no wheel."""
    return bool({"-h", "--help"} & set(session.posargs))


def run_build(session: nox.Session, arguments: Sequence[str] = ()) -> None:
    python = locked(session, "build")
    target = dict(itertools.pairwise(arguments)).get("--platform") or os.environ.get("FLASHMOE_PLATFORM") or MACHINE
    if target in environment.MACHINES and target != MACHINE:
        environment.foreign_torch(target)
    # Also sees packages from PYTHONPATH
    program(session, python, "flashmoe_build.environments.lock", "lockfiles/build.txt")
    program(session, python, "flashmoe_build", *arguments)


def absolute_paths(arguments: Sequence[str]) -> list[str]:
    """Test paths from the command line, made independent of the folder in which pytest runs."""
    return [
        str(ROOT / word) if (ROOT / word.split("::")[0]).exists() and word[0] not in "-/" else word
        for word in arguments
    ]


@nox.session
def main(session: nox.Session) -> None:
    """Emulate what changed, build, audit, smoke test and time it; one table at the end."""
    program(session, locked(session, "test"), "flashmoe", "gate", "--only", MAIN, "--budget-minutes", "120")


@nox.session
def build(session: nox.Session) -> None:
    """Compile every kernel and make the wheel (-- --archs native|all|90a,80)."""
    run_build(session, session.posargs)


@nox.session
def symbols(session: nox.Session) -> None:
    """Check symbols and resources of the newest wheel, or of the given files."""
    targets = list(session.posargs)
    if not asks_for_help(session) and not any(not word.startswith("-") for word in targets):
        objects = ROOT / "build" / "objects"  # of the newest wheel: duplicate definitions show only here
        targets += [str(newest_wheel(session)), *(("--objects", str(objects)) if objects.is_dir() else ())]
    program(session, locked(session, "build"), "flashmoe", "audit", *targets, "--json", REPORTS / "symbols.json")


@nox.session
def smoke(session: nox.Session) -> None:
    """Install the newest wheel and compare a few small results with plain PyTorch."""
    if asks_for_help(session):
        program(session, locked(session, "test"), "flashmoe_tools.smoke", "--help")
        return
    python = installed(session, newest_wheel(session))
    with session.chdir(outside("smoke")):
        program(session, python, "flashmoe_tools.smoke", "--json", REPORTS / "smoke.json", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Time attention against torch's backends (-- --help)."""
    words: tuple[str | Path, ...] = ("bench", "--json", REPORTS / "bench.json", *session.posargs)
    if asks_for_help(session):
        program(session, locked(session, "test"), "flashmoe", *words)
        return
    if "build-cost" in words:  # builds the checkout
        program(session, locked(session, "test"), "flashmoe_build.build_cost", *words[1:])
        return
    python = installed(session, newest_wheel(session))
    with session.chdir(outside("bench")):
        program(session, python, "flashmoe", *words)


@nox.session
def test(session: nox.Session) -> None:
    """Build if needed, install the wheel, run the tests against it (-- pytest arguments: -n 0 for one process, --cov for coverage)."""
    python = installed(session, wheel_file(session))
    arguments = absolute_paths([word for word in session.posargs if word != "--cov"])
    coverage = (  # doubles the time of Python code
        *("--cov=flashmoe", "--cov=flashmoe_build", "--cov=flashmoe_tools", f"--cov-config={ROOT / 'pyproject.toml'}"),
        *(f"--cov-report=json:{ROOT / 'build' / 'coverage' / 'coverage.json'}", "--cov-report=term:skip-covered"),
    )
    if not any(word.startswith(str(ROOT)) for word in arguments):
        # Each process gets whole files, so fixtures shared within a file are set up once. Number and order: tests/conftest.py.
        arguments = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", *arguments, str(ROOT / "tests")]
    environ = {
        "FLASHMOE_TEST_INSTALLED": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # processes share the files that one of them has rewritten
        # Spinning threads make a busy machine ten times slower; nothing is timed here.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "FLASHMOE_TEST_REPORT": str(REPORTS / "test.json"),
        "COVERAGE_FILE": str(ROOT / "build" / "coverage" / "data"),
    }
    with session.chdir(outside("test")):
        session.run(
            *(python, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)),
            *(coverage if "--cov" in session.posargs else ()),
            *arguments,
            env=environ,
            external=True,
        )


@nox.session
def flash_attn_tests(session: nox.Session) -> None:
    """Run a flash_attn test file that you supply on our functions (-- PATH --draw 400 --draw-seed 7 -n 12; --on-cpu)."""
    python = installed(session, wheel_file(session))
    words = [
        str(Path(session.invoked_from, word).resolve()) if word.endswith(".py") else word for word in session.posargs
    ]
    with session.chdir(outside("flash-attn")):
        program(session, python, "pytest", "-c", os.devnull, "-p", "flashmoe_tools.flash_attn_tests", *words)


@nox.session
def test_aarch64(session: nox.Session) -> None:
    """Test the newest AArch64 wheel's CPU side, under qemu-user on another machine (-- --quick; -- pytest arguments)."""
    words = absolute_paths(session.posargs)
    session.run(*(sys.executable, "-m", "flashmoe_build.release.aarch64", *words), external=True, success_codes=(0, 3))


@nox.session
def emulate(session: nox.Session) -> None:
    """Run the CUDA kernels on the CPU (-- --kernel sm90 --seeds 8; -- --changed; docs/emulation.md)."""
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # references are small: torch's threads would spin half of the time
    program(
        session,
        locked(session, "build"),
        "flashmoe_build.emulation",
        *("--json", REPORTS / "emulation.json"),
        *session.posargs,
    )


@nox.session
def mutants(session: nox.Session) -> None:
    """Plant bugs in host code, the CPU backend, Python and tools, and report which the tests notice (-- --folder NAME --most 50)."""
    report = ("--json", REPORTS / "mutants.json")
    program(session, locked(session, "test"), "flashmoe_build.emulation.mutation.repository", *report, *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """Rewrite lockfiles/*.txt and list what changed (-- --upgrade, -- --check)."""
    program(session, sys.executable, "flashmoe_build.environments.relock", *session.posargs)


@nox.session
def doctor(session: nox.Session) -> None:
    """List what this machine has, what it lacks, and how to fix it."""
    wheels = list((ROOT / "dist").glob(f"{WHEEL_PREFIX}*.whl"))
    python = installed(session, newest_wheel(session)) if wheels else locked(session, "test")
    with session.chdir(outside("doctor") if wheels else ROOT):
        program(session, python, "flashmoe", "doctor", *session.posargs)


@nox.session
def environments(session: nox.Session) -> None:
    """Only install locked environments (-- build test lint), as in an image's first layers."""
    for name in session.posargs or ("build",):
        locked(session, name)


def program_that_may_not_run(session: nox.Session, python: str, module: str, *arguments: str | Path) -> None:
    """Run a program that exits with 3 and writes no report if this machine lacks something it needs."""
    report = REPORTS / f"{session.name}.json"
    report.unlink(missing_ok=True)
    words = ("-m", module, *map(str, arguments))
    session.run(python, *words, external=True, success_codes=(0, 3))
    if not report.exists() and not asks_for_help(session):
        session.skip("NOT RUN (not passed); the reason is above")


@nox.session
def base_image(session: nox.Session) -> None:
    """Build a base image from Debian packages, without a registry (-- --update rewrites its pins)."""
    program_that_may_not_run(session, sys.executable, "flashmoe_build.containers.base", *session.posargs)


@nox.session
def image_pins(session: nox.Session) -> None:
    """Write the current registry digests of the base images into the Dockerfile (-- --check)."""
    python = locked(session, "container")
    program_that_may_not_run(session, python, "flashmoe_build.containers.pins", *session.posargs)


@nox.session
def image(session: nox.Session) -> None:
    """Build the container images (-- --base flashmoe-base:bookworm, test, bench)."""
    program_that_may_not_run(session, sys.executable, "flashmoe_build.containers.image", *session.posargs)


@nox.session
def image_test(session: nox.Session) -> None:
    """Run the built images and check that they behave as documented (-- pytest arguments)."""
    python, its_build = locked(session, "container"), ("--build-python", locked(session, "build"))
    program_that_may_not_run(session, python, "flashmoe_build.containers.image_test", *its_build, *session.posargs)


@nox.session
def ci_summary(session: nox.Session) -> None:
    """CI's last job: the verdict over all other jobs, from NEEDS."""
    program(session, locked(session, "container"), "flashmoe_build.release.workflows", "--summary")


@nox.session
def verify(session: nox.Session) -> None:
    """Check the newest wheel, or the given one, against its provenance (-- --rebuild)."""
    named = asks_for_help(session) or any(word.endswith(".whl") for word in session.posargs)
    wheel = [] if named else [newest_wheel(session)]
    program(session, locked(session, "build"), "flashmoe", "verify", *wheel, *session.posargs)


@nox.session
def hub(session: nox.Session) -> None:
    """Write the newest wheel as a Hugging Face kernels repository to build/hub; load it and check it there."""
    named = asks_for_help(session) or any(word.endswith(".whl") for word in session.posargs)
    wheel = [] if named else [newest_wheel(session)]
    words: tuple[str | Path, ...] = ("--json", REPORTS / "hub.json", *session.posargs)
    program(session, locked(session, "test"), "flashmoe_build.release.hub", *wheel, *words)


@nox.session
def compat(session: nox.Session) -> None:
    """Test the newest wheel under every supported torch and Python (-- --quick for the lowest and newest torch)."""
    wheel = [] if asks_for_help(session) else [newest_wheel(session)]
    program(session, sys.executable, "flashmoe_build.release.compat", *wheel, *session.posargs)


@nox.session
def engines(session: nox.Session) -> None:
    """Compare the pinned wheels of vLLM and SGLang with what our plug-ins call and implement (-- --newest; -- --record)."""
    program_that_may_not_run(session, sys.executable, "flashmoe_build.engines", *session.posargs)


# Sessions that pass their arguments to one program: its environment, module and first word, and what it does.
PROGRAMS = {
    "smem": ("test flashmoe smem", "Show what a kernel tile costs in shared memory, and on which GPU it fits (-- --help)."),
    "gate": ("test flashmoe gate", "Run every step from the environment to the baseline and stop at the first failure (-- --budget-minutes 15 --rate 0.60)."),
    "profile": ("test flashmoe profile", "Show where a kernel spends its time (-- --case KEY, -- --compare A.json B.json)."),
    "bisect": ("test flashmoe bisect", "Find the first commit that fails a gate (-- GOOD BAD --gate symbols|correctness|speed)."),
    "history": ("test flashmoe history", "Show what the gate found for each recorded commit, and the last known good."),
    "fuzz": ("test tests.fuzz", "Give damaged inputs to the readers of the audit (-- --seconds 60 --seed 7)."),
    "sanitize": ("test flashmoe_build.sanitize",
        "Run the CPU tests with AddressSanitizer and UBSan in host code and CPU backend (-- --sample; -- tests/cpu/...)."),
    "lint": ("lint flashmoe_build.lint", "Check sources, types, shell scripts, locks and generated text."),
    "docs": ("build flashmoe_build.docs", "Write the generated tables of README.md and docs/ (-- --check)."),
    "site": ("lint flashmoe_build.site", "Build the documentation as a site, in build/site; links are checked (Python 3.11 or newer)."),
    "newcomer": ("test flashmoe_build.newcomer",
        "Follow README and the guides on a clean machine, by commands cut out of them (-- --here: for the CPU, with this machine's caches)."),
    "gpu_test": ("build flashmoe_build.containers.gpu", "Run the test image, by digest, on this machine's GPU (-- --gpu sm90 --image NAME@sha256:...)."),
    "workflows": ("container flashmoe_build.release.workflows",
        "Check that CI's summary waits for every job (-- --check; -- --marked: the GPUs that have a runner and marks)."),
    "version": ("build flashmoe_build.release.version", "Print the version that a build carries now (-- --tag v0.1.0: fail unless that is its release)."),
    "statement": ("build flashmoe_build.release.statement",
        "Write the provenance of everything in dist/ as an in-toto statement: build/provenance.intoto.json."),
    "reproduce": ("build flashmoe_build.release.reproduce",
        "Build HEAD three times under different conditions and compare every byte (-- --archs 90a; -- --independent)."),
    "models": ("test flashmoe_build.model_sweep",
        "Every causal language model of transformers, made small, on flashmoe beside transformers' eager code: docs/guides/models.md."),
}  # fmt: skip


def hand_to(name: str) -> None:
    words, what = PROGRAMS[name]
    kind, *command = words.split()

    def run(session: nox.Session) -> None:
        program(session, locked(session, kind), *command, *session.posargs)

    run.__name__, run.__doc__ = name, what
    nox.session(run)


for _name in PROGRAMS:
    hand_to(_name)
