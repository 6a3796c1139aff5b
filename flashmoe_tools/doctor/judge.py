"""Facts in, verdicts out. Pure, so tests can construct every failure of a machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashmoe._version import DISTRIBUTION
from flashmoe.variables import PREFIX, VARIABLES, is_possible, similar
from flashmoe_tools.doctor.facts import Facts, Gpu
from flashmoe_tools.doctor.several import several
from flashmoe_tools.doctor.shadow import shadow
from flashmoe_tools.report import Check, Verdict

if TYPE_CHECKING:  # on Python 3.10 the tables need tomli; a missing tomli is one of the findings
    from flashmoe_tools.tables import Tables, Target

TORCH_FLOOR = (2, 10)
GLIBC_FLOOR = (2, 28)
GXX_FLOOR = 11
LOCKED_PYTHONS = ((3, 10), (3, 11), (3, 12))
DRIVER_FLOOR = 12000  # CUDA 12.x drivers load the machine code of any 12.y compiler
DRIVER_OF_COMPILER = 12080  # PTX of CUDA 12.8, and Blackwell's machine code, need this
REINSTALL = f"pip install --force-reinstall {DISTRIBUTION}"
NO_DEVICE = "CUDA_ERROR_NO_DEVICE"


@dataclass(frozen=True)
class Topic:
    """What is checked, and what is expected."""

    name: str
    expected: str

    def passed(self, found: str) -> Check:
        return Check(self.name, Verdict.PASS, found, self.expected)

    def skipped(self, found: str, why: str = "", fix: str = "") -> Check:
        return Check(self.name, Verdict.SKIP, found, self.expected, why, fix)

    def warned(self, found: str, why: str, fix: str) -> Check:
        return Check(self.name, Verdict.WARN, found, self.expected, why, fix)

    def failed(self, found: str, why: str, fix: str) -> Check:
        return Check(self.name, Verdict.FAIL, found, self.expected, why, fix)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.10.0+cu128`` gives (2, 10, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def judge(facts: Facts, tables: Tables | str) -> tuple[Check, ...]:
    """One check per topic, in the order in which to fix them. ``tables`` is the reason as text if they cannot be read."""
    return (
        python(facts),
        shadow(facts.shadows),
        package(tables),
        torch(facts),
        numpy(facts),
        driver(facts),
        gpus(facts, tables),
        several(facts),
        compiler(facts),
        lock(facts),
        variables(facts),
        extension(facts),
        loads(facts),
        smoke(facts),
    )


def python(facts: Facts) -> Check:
    have = facts.python
    found = f"{have.implementation} {'.'.join(map(str, have.version))}, {have.system} {have.machine}, glibc {have.glibc or 'none'}"
    topic = Topic("python", "CPython 3.10 or newer, Linux x86_64 or aarch64, glibc 2.28 or newer")
    if have.system != "Linux" or have.machine not in ("x86_64", "aarch64"):
        why = "the wheels hold Linux code for x86-64 and AArch64"
        return topic.failed(found, why, "use another machine")
    if numbers(have.glibc) < GLIBC_FLOOR:
        why = "the extension uses symbols that this C library lacks (manylinux_2_28 is torch's own floor)"
        return topic.failed(found, why, "a distribution of 2019 or later, glibc based")
    if have.implementation != "cpython" or have.version < (3, 10):
        return topic.failed(found, "torch has no wheels for it", "install CPython 3.12")
    if facts.lock.checkout and have.version[:2] not in LOCKED_PYTHONS:
        why = "the locked environments need 3.10 to 3.12 (numpy<2); the wheel itself runs here"
        return topic.warned(found, why, "FLASHMOE_PYTHON=3.12 ./nox, for building and testing")
    return topic.passed(found)


def package(tables: Tables | str) -> Check:
    """Whether flashmoe itself is complete: its tables, and on Python 3.10 the module that reads them."""
    topic = Topic("package", "the GPU and kernel tables")
    if isinstance(tables, str):
        fix = "pip install tomli" if "tomli" in tables else REINSTALL
        return topic.failed(tables, "it was installed without its dependencies, or is damaged", fix)
    return topic.passed(f"{len(tables.gpus)} GPUs, {len(tables.kernels)} kernel rows")


def torch(facts: Facts) -> Check:
    topic = Topic("torch", "torch >= 2.10, once")
    have = facts.torch
    if facts.probe.ran and not facts.probe.torch_version:
        why = "it is there but cannot be imported" + (": it took too long or hangs" if facts.probe.timed_out else "")
        fix = f"python -c 'import torch' shows the same; pip install --force-reinstall torch=={have.version or '2.10'}"
        return topic.failed(f"{have.version} {facts.probe.problem}".strip(), why, fix)
    if not have.versions:
        return topic.failed("not installed", "", "pip install 'torch>=2.10'")
    if len(have.versions) > 1:
        found = " and ".join(have.versions)
        return topic.failed(found, "two copies shadow each other", "pip uninstall torch, twice, and install one")
    if numbers(have.version)[:2] < TORCH_FLOOR:
        why = "the extension uses torch's stable C ABI, versioned since 2.10; an older torch lacks its functions"
        return topic.failed(have.version, why, "pip install 'torch>=2.10'")
    imported = facts.probe.torch_version
    if imported and imported.partition("+")[0] != have.version.partition("+")[0]:
        found = f"{imported} is imported, {have.version or 'none'} is installed"
        why = "another torch precedes the installed one on the path (PYTHONPATH, a folder of that name)"
        return topic.failed(found, why, "python -c 'import torch; print(torch.__file__)'; remove it")
    found = f"{have.version}, built for {'CUDA ' + facts.torch_cuda if facts.torch_cuda else 'the CPU only'}"
    if facts.driver.gpus and not facts.torch_cuda:
        why = "this torch cannot use CUDA, so the GPU here stays unused"
        return Check(
            "torch", Verdict.WARN, found, "a CUDA build on a machine with a GPU", why, "install torch's CUDA build"
        )
    return topic.passed(found)


def numpy(facts: Facts) -> Check:
    have = facts.numpy
    if not have.versions:
        return Check("numpy", Verdict.SKIP, "not installed", "", "flashmoe does not need it")
    if len(have.versions) > 1:
        found = " and ".join(have.versions)
        why = "which one is imported depends on the path"
        return Check(
            "numpy", Verdict.FAIL, found, "numpy once", why, "pip uninstall numpy until none is left, install one"
        )
    if facts.lock.name and numbers(have.version) >= (2,):
        why = "the lock has numpy<2, so that modules built for numpy 1 keep working"
        return Check(
            "numpy",
            Verdict.FAIL,
            have.version,
            "numpy < 2 in a locked environment",
            why,
            f"rm -rf .nox/env/{facts.lock.name}-*",
        )
    return Check(
        "numpy", Verdict.PASS, have.version, "any that this torch accepts" if not facts.lock.name else "numpy < 2"
    )


def driver(facts: Facts) -> Check:
    have = facts.driver
    shown = f"CUDA {have.version // 1000}.{have.version % 1000 // 10}"
    topic = Topic("driver", "CUDA 12.8 or newer for every kernel, 12.0 for machine code up to compute capability 9.0")
    if have.version == 0 and not have.error:
        return topic.skipped("no libcuda.so.1", "without a driver the CPU backend runs")
    if have.error == NO_DEVICE:
        return topic.skipped(f"{shown}, no GPU", "the CPU backend runs")
    if have.error:
        why = "the driver library is there but does not work; a container may lack the device files"
        return topic.failed(f"{shown}: {have.error}", why, "nvidia-smi, then reboot or reinstall the driver")
    if have.version < DRIVER_FLOOR:
        return topic.failed(shown, "kernels built by CUDA 12.8 do not load on it", "install driver 525 or newer")
    if have.version < DRIVER_OF_COMPILER:
        why = "it cannot load PTX of CUDA 12.8 or Blackwell's machine code"
        return topic.warned(shown, why, "install driver 570 or newer")
    return topic.passed(shown)


def serving_target(capability: tuple[int, int], targets: Iterable[Target]) -> Target | None:
    """The best of ``targets`` for a GPU: its own machine code, then its family's, then PTX."""
    usable = [target for target in targets if _loads(target, capability)]
    return max(usable, key=lambda target: (not target.is_ptx, target.capability, target.is_arch_specific), default=None)


def _loads(target: Target, capability: tuple[int, int]) -> bool:
    if target.is_arch_specific:
        return capability == target.capability
    if target.is_ptx:
        return capability >= target.capability
    return capability[0] == target.capability[0] and capability >= target.capability


def gpus(facts: Facts, tables: Tables | str) -> Check:
    if not facts.driver.gpus:
        return Check("gpus", Verdict.SKIP, "none", "", "the CPU backend runs")
    if isinstance(tables, str):
        return Check("gpus", Verdict.SKIP, "not compared", "", "the tables cannot be read, see above")
    names = facts.probe.targets or facts.extension.targets
    found = "; ".join(f"{gpu.name} ({_dotted(gpu.compute_capability)})" for gpu in facts.driver.gpus)
    if not names:
        return Check(
            "gpus", Verdict.SKIP, found, "", "there is no extension whose kernels could be compared", "nox -s build"
        )
    built = [target for target in tables.targets if target.name in names]
    topic = Topic("gpus", f"kernels for each; this build holds {', '.join(names)}")
    lost = [gpu for gpu in facts.driver.gpus if serving_target(gpu.compute_capability, built) is None]
    if lost:
        return topic.failed(found, f"none of them runs on {_listed(lost)}", _rebuild(lost))
    by_ptx = [
        gpu for gpu in facts.driver.gpus if (target := serving_target(gpu.compute_capability, built)) and target.is_ptx
    ]
    if by_ptx:
        why = f"{_listed(by_ptx)} runs PTX that the driver compiles at the first call: slower to start, not tuned"
        return topic.warned(found, why, _rebuild(by_ptx))
    return topic.passed(found)


def _rebuild(gpus: Sequence[Gpu]) -> str:
    archs = ",".join(sorted({f"{gpu.compute_capability[0]}{gpu.compute_capability[1]}" for gpu in gpus}))
    return f"a wheel with machine code for it: FLASHMOE_ARCHS={archs} ./nox -s build, if the compiler knows it"


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(gpu.name for gpu in gpus)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def compiler(facts: Facts) -> Check:
    have = facts.compiler
    topic = Topic("g++", f"g++ {GXX_FLOOR} or newer, for building")
    if not facts.lock.checkout:
        return topic.skipped(have.version or "none", "an installed wheel needs no compiler")
    if not have.version:
        return topic.failed(
            f"no {have.command}, or none that reports its version",
            "",
            "Debian, Ubuntu: apt-get install g++; or set CXX",
        )
    if numbers(have.version)[0] < GXX_FLOOR:
        why = "torch's headers need a complete C++17"
        return topic.failed(have.version, why, "install a newer one, or set CXX=g++-12")
    return topic.passed(f"{have.command} {have.version}")


def lock(facts: Facts) -> Check:
    have = facts.lock
    if not have.checkout:
        return Check("lock", Verdict.SKIP, "not in a checkout", "", "an installed wheel has no lock")
    if not have.name:
        return Check(
            "lock", Verdict.SKIP, "this Python is not in a locked environment", "", "", "./nox -s doctor runs in one"
        )
    topic = Topic("lock", f"the packages of lockfiles/{have.name}.txt, each once")
    if have.problem:
        return topic.failed(
            have.problem, "results from another environment prove nothing", f"rm -rf .nox/env/{have.name}-*"
        )
    return topic.passed(f"matches lockfiles/{have.name}.txt")


def variables(facts: Facts) -> Check:
    """None of the usual variables is needed; ours change what runs, so they are listed."""
    own = {name: value for name, value in facts.variables.items() if name.startswith(PREFIX)}
    for name, value in own.items():
        known = VARIABLES.get(name)
        if known is None and (meant := similar(name)):
            return Check(
                "variables",
                Verdict.FAIL,
                name,
                meant,
                "no variable of flashmoe: it has no effect",
                f"unset {name}, or rename it",
            )
        if known is not None and not is_possible(known, value):
            why = "flashmoe refuses an unknown value, at import or at the first call"
            return Check(
                "variables",
                Verdict.FAIL,
                f"{name}={value}",
                ", ".join(known.values),
                why,
                f"correct it, or unset {name}",
            )
    foreign = sorted(set(facts.variables) - set(own))
    changing = {name: value for name, value in own.items() if name not in VARIABLES or VARIABLES[name].when == "run"}
    changing.pop("FLASHMOE_FALLBACK", None)  # selects what a call does that goes to torch; replaces nothing
    nvcc = "nvcc on PATH" if facts.nvcc else "no nvcc on PATH"
    found = f"{', '.join(foreign) or 'no CUDA_HOME, no LD_LIBRARY_PATH'}; {nvcc}; doctor --variables lists flashmoe's"
    topic = Topic("variables", "none is required: no CUDA toolkit, CUDA_HOME, LD_LIBRARY_PATH or python3-dev")
    if changing:
        text = ", ".join(f"{name}={value}" for name, value in sorted(changing.items()))
        why = "they replace the default kernel or library, or change what a call checks"
        return topic.warned(f"{text}; {found}", why, f"unset {' '.join(sorted(changing))}")
    if "LD_PRELOAD" in foreign:
        why = "a preloaded library can replace functions that torch and flashmoe call"
        return topic.warned(found, why, "unset LD_PRELOAD, if something fails")
    return topic.passed(found)


def extension(facts: Facts) -> Check:
    have = facts.extension
    topic = Topic("extension", "libflashmoe.so beside the package, with its provenance")
    if not have.found and facts.lock.checkout:
        return topic.skipped(have.shown or "not built", "a fresh clone has none", "./nox -s build")
    if not have.found:
        return topic.failed(
            have.shown or "not there", "the wheel is damaged, or this was not installed from a wheel", REINSTALL
        )
    if have.damaged:
        fix = "./nox -s build" if facts.lock.checkout else REINSTALL
        why = "a truncated download, a Git LFS pointer, or another file of this name"
        return topic.failed(f"{have.shown}; it is not an ELF file", why, fix)
    if have.error:
        return topic.warned(f"{have.shown}; {have.error}", "its origin is unknown", "reinstall the wheel")
    return topic.passed(f"{have.shown}: {', '.join(have.targets) or 'CPU backend only'}")


def loads(facts: Facts) -> Check:
    have = facts.probe
    topic = Topic("loads", "torch imports it and registers its operator")
    if not have.ran or (have.torch_version and not facts.extension.found):
        return topic.skipped("not tried", "torch or the extension is missing, see above")
    if not have.torch_version:
        return topic.skipped("not tried", "torch cannot be imported, see above")
    if not have.loaded:
        why = "it took too long or hangs" if have.timed_out else ""
        is_ours = have.load_error.startswith("ArgumentError")  # raised for a variable, which the message names
        fix = "see variables, above" if is_ours else "python -m flashmoe audit libflashmoe.so names the cause"
        return topic.failed(have.load_error, why, fix)
    return topic.passed(f"under torch {have.torch_version}, {have.seconds:.1f} s including the smoke test")


def smoke(facts: Facts) -> Check:
    have = facts.probe
    topic = Topic("smoke", "the same attention as plain PyTorch")
    if not have.loaded:
        return topic.skipped("not tried", "the extension was not loaded")
    if not have.smoke_ok and have.smoke_raised:
        why = "the call was refused or failed; no number was wrong"
        fix = "the message says what to change; FLASHMOE_ variables are listed above"
        return topic.failed(have.smoke, why, fix)
    if not have.smoke_ok:
        why = "the installed extension computes wrong results, or crashes, on this machine"
        return topic.failed(have.smoke or "no answer", why, "python -m flashmoe_tools.smoke, then report it")
    return topic.passed(have.smoke)
