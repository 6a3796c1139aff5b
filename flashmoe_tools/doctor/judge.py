"""Facts in, verdicts out. Pure, so a test can construct every failure of a machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flashmoe._extension import CPU_ISA_VARIABLE, CPU_ISAS
from flashmoe._version import DISTRIBUTION
from flashmoe_tools.doctor.facts import Facts, Gpu
from flashmoe_tools.doctor.several import several
from flashmoe_tools.doctor.shadow import shadow
from flashmoe_tools.report import Check, Verdict

if TYPE_CHECKING:  # on Python 3.10 the tables need tomli, and its absence is one of the findings
    from flashmoe_tools.tables import Tables, Target

TORCH_FLOOR = (2, 10)
GLIBC_FLOOR = (2, 28)
GXX_FLOOR = 11
LOCKED_PYTHONS = ((3, 10), (3, 11), (3, 12))
DRIVER_FLOOR = 12000  # CUDA 12.x drivers load the machine code of any 12.y compiler
DRIVER_OF_COMPILER = 12080  # PTX of CUDA 12.8, and Blackwell's machine code, need this
REINSTALL = f"pip install --force-reinstall {DISTRIBUTION}"
NO_DEVICE = "CUDA_ERROR_NO_DEVICE"


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.10.0+cu128`` gives (2, 10, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def judge(facts: Facts, tables: Tables | str) -> tuple[Check, ...]:
    """One check per topic, in the order to fix them. ``tables`` is a text, the reason, if they could not be read."""
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
        variables(facts, tables),
        extension(facts),
        loads(facts),
        smoke(facts),
    )


def python(facts: Facts) -> Check:
    have = facts.python
    found = f"{have.implementation} {'.'.join(map(str, have.version))}, {have.system} {have.machine}, glibc {have.glibc or 'none'}"
    expected = "CPython 3.10 or newer, Linux x86_64 or aarch64, glibc 2.28 or newer"
    if have.system != "Linux" or have.machine not in ("x86_64", "aarch64"):
        why = "the wheels hold Linux code for x86-64 and AArch64"
        return Check("python", Verdict.FAIL, found, expected, why, "use another machine")
    if numbers(have.glibc) < GLIBC_FLOOR:
        why = "the extension uses symbols that this C library lacks (manylinux_2_28 is torch's own floor)"
        return Check("python", Verdict.FAIL, found, expected, why, "a distribution of 2019 or later, glibc based")
    if have.implementation != "cpython" or have.version < (3, 10):
        return Check("python", Verdict.FAIL, found, expected, "torch has no wheels for it", "install CPython 3.12")
    if facts.lock.checkout and have.version[:2] not in LOCKED_PYTHONS:
        why = "the locked environments need 3.10 to 3.12 (numpy<2); the wheel itself runs here"
        return Check(
            "python", Verdict.WARN, found, expected, why, "FLASHMOE_PYTHON=3.12 ./nox, for building and testing"
        )
    return Check("python", Verdict.PASS, found, expected)


def package(tables: Tables | str) -> Check:
    """Whether flashmoe itself is complete: its tables, and on Python 3.10 the module that reads them."""
    expected = "the GPU and kernel tables"
    if isinstance(tables, str):
        fix = "pip install tomli" if "tomli" in tables else REINSTALL
        return Check(
            "package", Verdict.FAIL, tables, expected, "it was installed without its dependencies, or is damaged", fix
        )
    return Check("package", Verdict.PASS, f"{len(tables.gpus)} GPUs, {len(tables.kernels)} kernel rows", expected)


def torch(facts: Facts) -> Check:
    expected = "torch >= 2.10, once"
    have = facts.torch
    if facts.probe.ran and not facts.probe.torch_version:
        why = "it is there but cannot be imported" + (": it took too long or hangs" if facts.probe.timed_out else "")
        fix = f"python -c 'import torch' shows the same; pip install --force-reinstall torch=={have.version or '2.10'}"
        return Check("torch", Verdict.FAIL, f"{have.version} {facts.probe.problem}".strip(), expected, why, fix)
    if not have.versions:
        return Check("torch", Verdict.FAIL, "not installed", expected, "", "pip install 'torch>=2.10'")
    if len(have.versions) > 1:
        found = " and ".join(have.versions)
        return Check(
            "torch",
            Verdict.FAIL,
            found,
            expected,
            "two copies shadow each other",
            "pip uninstall torch, twice, and install one",
        )
    if numbers(have.version)[:2] < TORCH_FLOOR:
        why = "the extension uses torch's stable C ABI, versioned since 2.10; an older torch lacks its functions"
        return Check("torch", Verdict.FAIL, have.version, expected, why, "pip install 'torch>=2.10'")
    imported = facts.probe.torch_version
    if imported and imported.partition("+")[0] != have.version.partition("+")[0]:
        found = f"{imported} is imported, {have.version or 'none'} is installed"
        why = "another torch stands before the installed one on the path (PYTHONPATH, a folder of that name)"
        return Check(
            "torch", Verdict.FAIL, found, expected, why, "python -c 'import torch; print(torch.__file__)'; remove it"
        )
    found = f"{have.version}, built for {'CUDA ' + facts.torch_cuda if facts.torch_cuda else 'the CPU only'}"
    if facts.driver.gpus and not facts.torch_cuda:
        why = "this torch cannot use CUDA, so the GPU here stays unused"
        return Check(
            "torch", Verdict.WARN, found, "a CUDA build on a machine with a GPU", why, "install torch's CUDA build"
        )
    return Check("torch", Verdict.PASS, found, expected)


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
    expected = "CUDA 12.8 or newer for every kernel, 12.0 for machine code up to compute capability 9.0"
    if have.version == 0 and not have.error:
        return Check("driver", Verdict.SKIP, "no libcuda.so.1", expected, "without a driver the CPU backend runs")
    if have.error == NO_DEVICE:
        return Check("driver", Verdict.SKIP, f"{shown}, no GPU", expected, "the CPU backend runs")
    if have.error:
        why = "the driver library is there but does not work; a container may lack the device files"
        return Check(
            "driver",
            Verdict.FAIL,
            f"{shown}: {have.error}",
            expected,
            why,
            "nvidia-smi, then reboot or reinstall the driver",
        )
    if have.version < DRIVER_FLOOR:
        return Check(
            "driver",
            Verdict.FAIL,
            shown,
            expected,
            "kernels built by CUDA 12.8 do not load on it",
            "install driver 525 or newer",
        )
    if have.version < DRIVER_OF_COMPILER:
        why = "it cannot load PTX of CUDA 12.8 or Blackwell's machine code"
        return Check("driver", Verdict.WARN, shown, expected, why, "install driver 570 or newer")
    return Check("driver", Verdict.PASS, shown, expected)


def serving_target(capability: tuple[int, int], targets: Iterable[Target]) -> Target | None:
    """The best of ``targets`` that a GPU can load: machine code of its own, then of its family, then PTX."""
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
    expected = f"kernels for each; this build holds {', '.join(names)}"
    lost = [gpu for gpu in facts.driver.gpus if serving_target(gpu.compute_capability, built) is None]
    if lost:
        return Check("gpus", Verdict.FAIL, found, expected, f"none of them runs on {_listed(lost)}", _rebuild(lost))
    by_ptx = [
        gpu for gpu in facts.driver.gpus if (target := serving_target(gpu.compute_capability, built)) and target.is_ptx
    ]
    if by_ptx:
        why = f"{_listed(by_ptx)} runs PTX that the driver compiles at the first call: slower to start, not tuned"
        return Check("gpus", Verdict.WARN, found, expected, why, _rebuild(by_ptx))
    return Check("gpus", Verdict.PASS, found, expected)


def _rebuild(gpus: Sequence[Gpu]) -> str:
    archs = ",".join(sorted({f"{gpu.compute_capability[0]}{gpu.compute_capability[1]}" for gpu in gpus}))
    return f"a wheel with machine code for it: FLASHMOE_ARCHS={archs} ./nox -s build, if the compiler knows it"


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(gpu.name for gpu in gpus)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def compiler(facts: Facts) -> Check:
    have = facts.compiler
    expected = f"g++ {GXX_FLOOR} or newer, for building"
    if not facts.lock.checkout:
        return Check("g++", Verdict.SKIP, have.version or "none", expected, "an installed wheel needs no compiler")
    if not have.version:
        return Check(
            "g++",
            Verdict.FAIL,
            f"no {have.command}, or none that reports its version",
            expected,
            "",
            "Debian, Ubuntu: apt-get install g++; or set CXX",
        )
    if numbers(have.version)[0] < GXX_FLOOR:
        why = "torch's headers need a complete C++17"
        return Check("g++", Verdict.FAIL, have.version, expected, why, "install a newer one, or set CXX=g++-12")
    return Check("g++", Verdict.PASS, f"{have.command} {have.version}", expected)


def lock(facts: Facts) -> Check:
    have = facts.lock
    if not have.checkout:
        return Check("lock", Verdict.SKIP, "not in a checkout", "", "an installed wheel has no lock")
    if not have.name:
        return Check(
            "lock",
            Verdict.SKIP,
            "this Python is not in a locked environment",
            "",
            "",
            "./nox -s doctor runs in one",
        )
    expected = f"the packages of lockfiles/{have.name}.txt, each once"
    if have.problem:
        return Check(
            "lock",
            Verdict.FAIL,
            have.problem,
            expected,
            "results from another environment prove nothing",
            f"rm -rf .nox/env/{have.name}-*",
        )
    return Check("lock", Verdict.PASS, f"matches lockfiles/{have.name}.txt", expected)


def allowed_values(tables: Tables | str) -> dict[str, tuple[str, ...]]:
    """The values of our variables that have a fixed set of them."""
    families = () if isinstance(tables, str) else tuple(sorted({row.family for row in tables.kernels}))
    return {
        "FLASHMOE_FALLBACK": ("allow", "warn", "error"),
        CPU_ISA_VARIABLE: CPU_ISAS,
        "FLASHMOE_KERNEL": families,
        "FLASHMOE_SPLIT_BACKWARD": ("0", "1"),
    }


def variables(facts: Facts, tables: Tables | str) -> Check:
    """None of the usual variables is needed; ours change what runs, so they are listed."""
    for name, values in allowed_values(tables).items():
        value = facts.variables.get(name, "")
        if value and values and value not in values:
            why = "flashmoe refuses an unknown value, at import or at the first call"
            found = f"{name}={value}"
            return Check("variables", Verdict.FAIL, found, ", ".join(values), why, f"correct it, or unset {name}")
    own = {name: value for name, value in facts.variables.items() if name.startswith("FLASHMOE_")}
    foreign = sorted(set(facts.variables) - set(own))
    own.pop("FLASHMOE_FALLBACK", None)  # says what a call that goes to torch does, and replaces nothing
    nvcc = "nvcc on PATH" if facts.nvcc else "no nvcc on PATH"
    found = f"{', '.join(foreign) or 'no CUDA_HOME, no LD_LIBRARY_PATH'}; {nvcc}"
    expected = "none is required: no CUDA toolkit, CUDA_HOME, LD_LIBRARY_PATH or python3-dev"
    if own:
        text = ", ".join(f"{name}={value}" for name, value in sorted(own.items()))
        return Check(
            "variables",
            Verdict.WARN,
            f"{text}; {found}",
            expected,
            "they replace the default kernel or library",
            f"unset {' '.join(sorted(own))}",
        )
    if "LD_PRELOAD" in foreign:
        why = "a preloaded library can replace functions that torch and flashmoe call"
        return Check("variables", Verdict.WARN, found, expected, why, "unset LD_PRELOAD, if something fails")
    return Check("variables", Verdict.PASS, found, expected)


def extension(facts: Facts) -> Check:
    have = facts.extension
    expected = "libflashmoe.so beside the package, with its provenance"
    if not have.found and facts.lock.checkout:
        return Check(
            "extension", Verdict.SKIP, have.shown or "not built", expected, "a fresh clone has none", "./nox -s build"
        )
    if not have.found:
        return Check(
            "extension",
            Verdict.FAIL,
            have.shown or "not there",
            expected,
            "the wheel is damaged, or this was not installed from a wheel",
            REINSTALL,
        )
    if have.damaged:
        fix = "./nox -s build" if facts.lock.checkout else REINSTALL
        why = "a truncated download, a Git LFS pointer, or another file of this name"
        return Check("extension", Verdict.FAIL, f"{have.shown}; it is not an ELF file", expected, why, fix)
    if have.error:
        return Check(
            "extension",
            Verdict.WARN,
            f"{have.shown}; {have.error}",
            expected,
            "its origin is unknown",
            "reinstall the wheel",
        )
    return Check("extension", Verdict.PASS, f"{have.shown}: {', '.join(have.targets) or 'CPU backend only'}", expected)


def loads(facts: Facts) -> Check:
    have = facts.probe
    expected = "torch imports it and registers its operator"
    if not have.ran or (have.torch_version and not facts.extension.found):
        return Check("loads", Verdict.SKIP, "not tried", expected, "torch or the extension is missing, see above")
    if not have.torch_version:
        return Check("loads", Verdict.SKIP, "not tried", expected, "torch cannot be imported, see above")
    if not have.loaded:
        why = "it took too long or hangs" if have.timed_out else ""
        return Check(
            "loads",
            Verdict.FAIL,
            have.load_error,
            expected,
            why,
            "python -m flashmoe audit libflashmoe.so names the cause",
        )
    return Check(
        "loads",
        Verdict.PASS,
        f"under torch {have.torch_version}, {have.seconds:.1f} s including the smoke test",
        expected,
    )


def smoke(facts: Facts) -> Check:
    have = facts.probe
    expected = "the same attention as plain PyTorch"
    if not have.loaded:
        return Check("smoke", Verdict.SKIP, "not tried", expected, "the extension was not loaded")
    if not have.smoke_ok and have.smoke_raised:
        why = "the call was refused or failed; no number was wrong"
        fix = "the message says what to change; FLASHMOE_ variables are listed above"
        return Check("smoke", Verdict.FAIL, have.smoke, expected, why, fix)
    if not have.smoke_ok:
        why = "the installed extension computes wrong results, or crashes, on this machine"
        return Check(
            "smoke",
            Verdict.FAIL,
            have.smoke or "no answer",
            expected,
            why,
            "python -m flashmoe_tools.smoke, then report it",
        )
    return Check("smoke", Verdict.PASS, have.smoke, expected)
