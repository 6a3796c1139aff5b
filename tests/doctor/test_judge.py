"""Every failure of a machine, simulated: the verdict, what it names and the fix it gives."""

from dataclasses import replace

import pytest

from flashmoe.errors import ExitCode
from flashmoe_tools.doctor import judge as judging
from flashmoe_tools.doctor.cli import render
from flashmoe_tools.doctor.facts import Compiler, Driver, Extension, Facts, Gpu, Links, Lock, Package, Probe, Python
from flashmoe_tools.doctor.judge import judge, serving_target
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.tables import load_tables

TABLES = load_tables()
ALL_TARGETS = tuple(target.name for target in TABLES.targets)
H100 = Gpu("NVIDIA H100", (9, 0))
GOOD = Facts(
    flashmoe="0.1.0",
    python=Python((3, 11, 7), "cpython", "x86_64", "Linux", "2.36"),
    torch=Package(("2.10.0",)),
    torch_cuda="12.8",
    numpy=Package(("1.26.4",)),
    driver=Driver(12080, (H100,)),
    compiler=Compiler("g++", "12.2.0"),
    lock=Lock(checkout=True, name="test"),
    extension=Extension(found=True, shown="flashmoe/libflashmoe.so", targets=ALL_TARGETS),
    probe=Probe(
        ran=True,
        loaded=True,
        torch_version="2.10.0",
        smoke="6 problems right",
        smoke_ok=True,
        targets=ALL_TARGETS,
        nccl="2.27.5",
    ),
)


def look(name: str, **changes: object) -> Check:
    checks = {check.name: check for check in judge(replace(GOOD, **changes), TABLES)}
    return checks[name]


def gpu_with(*targets: str) -> dict[str, object]:
    return {"extension": replace(GOOD.extension, targets=targets), "probe": replace(GOOD.probe, targets=targets)}


def test_a_good_machine_passes_throughout() -> None:
    checks = judge(GOOD, TABLES)
    assert {check.verdict for check in checks} == {Verdict.PASS}
    assert len({check.name for check in checks}) == len(checks) == 14


TWO = Driver(12080, (H100, H100))
LOADED = GOOD.probe
PASS, WARN, FAIL, SKIP = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.SKIP
WHEEL, CLONE = Lock(checkout=False), Lock(checkout=True)


def python(**changes: object) -> dict[str, object]:
    return {"python": replace(GOOD.python, **changes)}  # type: ignore[arg-type]


def torch(*versions: str) -> dict[str, object]:
    probe = replace(LOADED, torch_version=(*versions, "")[0]) if versions else Probe()
    return {"torch": Package(versions), "probe": probe}


def probe(**changes: object) -> dict[str, object]:
    return {"probe": replace(LOADED, **changes)}  # type: ignore[arg-type]


def numpy(*versions: str, lock: str = "") -> dict[str, object]:
    return {"numpy": Package(versions), "lock": Lock(checkout=bool(lock), name=lock)}


def compiler(version: str, lock: Lock = CLONE) -> dict[str, object]:
    return {"compiler": Compiler("g++", version), "lock": lock}


def extension(lock: Lock = WHEEL, **facts: object) -> dict[str, object]:
    return {"extension": Extension(**{"found": True, "shown": "x", **facts}), "lock": lock}  # type: ignore[arg-type]


def variables(**values: str) -> dict[str, object]:
    return {"variables": values}


NO_TORCH = Probe(ran=True, problem="ImportError: libcudart.so.12: cannot open shared object file")
NOT_LOADED = Probe(ran=True, torch_version="2.10.0", load_error="ExtensionError: undefined symbol: aoti_torch_x")
# (topic, difference from a good machine, verdict, words in the check)
CASES: list[tuple[str, dict[str, object], Verdict, tuple[str, ...]]] = [
    ("python", python(machine="riscv64"), FAIL, ("x86-64 and AArch64",)),
    ("python", python(system="Darwin"), FAIL, ("x86-64",)),
    ("python", python(glibc="2.17"), FAIL, ("manylinux_2_28",)),
    ("python", python(glibc=""), FAIL, ("manylinux_2_28",)),
    ("python", python(implementation="pypy"), FAIL, ("no wheels",)),
    ("python", python(version=(3, 13, 0)), WARN, ("FLASHMOE_PYTHON=3.12",)),
    ("python", {**python(version=(3, 13, 0)), "lock": WHEEL}, PASS, ()),
    ("torch", torch(), FAIL, ("not installed",)),
    ("torch", torch("2.8.0"), FAIL, ("2.8.0",)),
    ("torch", torch("2.9.1+cu126"), FAIL, ("2.9.1",)),
    ("torch", torch("2.10.0", "2.8.0"), FAIL, ("2.10.0 and 2.8.0",)),
    ("torch", torch("2.10.0+cu128"), PASS, ("CUDA 12.8",)),
    ("torch", torch("2.13.0"), PASS, ("2.13.0",)),
    ("torch", torch("3.0.0a1"), PASS, ("3.0.0a1",)),
    ("torch", {"torch_cuda": ""}, WARN, ("cannot use CUDA",)),
    ("torch", {"torch_cuda": "", "driver": Driver()}, PASS, ()),
    ("torch", {"probe": NO_TORCH}, FAIL, ("libcudart.so.12", "import torch")),
    ("torch", probe(torch_version="2.13.0+cpu"), FAIL, ("2.13.0+cpu is imported, 2.10.0 is installed",)),
    ("torch", probe(torch_version="2.10.0+cu128"), PASS, ()),
    ("numpy", numpy(), SKIP, ()),
    ("numpy", numpy("1.26.4", lock="test"), PASS, ()),
    ("numpy", numpy("2.1.0", lock="test"), FAIL, ("numpy<2",)),
    ("numpy", numpy("2.1.0"), PASS, ()),
    ("numpy", numpy("1.26.4", "2.1.0"), FAIL, ("1.26.4 and 2.1.0",)),
    ("driver", {"driver": Driver()}, SKIP, ("no libcuda.so.1",)),
    ("driver", {"driver": Driver(12080, error="CUDA_ERROR_NO_DEVICE")}, SKIP, ("CUDA 12.8, no GPU",)),
    ("driver", {"driver": Driver(12080, error="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")}, FAIL, ("DRIVER_MISMATCH",)),
    ("driver", {"driver": Driver(11080, (H100,))}, FAIL, ("CUDA 11.8",)),
    ("driver", {"driver": Driver(12040, (H100,))}, WARN, ("CUDA 12.4",)),
    ("driver", {"driver": Driver(13000, (H100,))}, PASS, ("CUDA 13.0",)),
    ("gpus", gpu_with("sm_75", "sm_80"), FAIL, ("none of them runs on NVIDIA H100", "FLASHMOE_ARCHS=90 ./nox -s build", "holds sm_75, sm_80")),
    ("gpus", gpu_with("sm_80", "compute_80"), WARN, ("the driver compiles at the first call",)),
    ("gpus", gpu_with(), SKIP, ()),
    ("gpus", {"driver": Driver()}, SKIP, ()),
    ("g++", compiler("12.2.0"), PASS, ()),
    ("g++", compiler("11.4.0"), PASS, ()),
    ("g++", compiler("10.2.1"), FAIL, ("C++17",)),
    ("g++", compiler(""), FAIL, ("apt-get install g++",)),
    ("g++", compiler("", WHEEL), SKIP, ()),
    ("lock", {"lock": Lock(True, "test", "numpy is installed more than once (1.26.4 and 2.1.0)")}, FAIL, ("numpy is installed more than once",)),
    ("lock", {"lock": CLONE}, SKIP, ()),
    ("lock", {"lock": WHEEL}, SKIP, ()),
    ("variables", variables(), PASS, ("none is required: no CUDA toolkit",)),
    ("variables", variables(CUDA_HOME="/x", LD_LIBRARY_PATH="/y"), PASS, ()),
    ("variables", variables(LD_PRELOAD="/x.so"), WARN, ()),
    ("variables", variables(FLASHMOE_KERNEL="sm75"), WARN, ("FLASHMOE_KERNEL=sm75", "unset FLASHMOE_KERNEL")),
    ("variables", variables(FLASHMOE_FALLBACK="foo"), FAIL, ("FLASHMOE_FALLBACK=foo", "warn")),
    ("variables", variables(FLASHMOE_FALLBACK="warn"), PASS, ()),
    ("variables", variables(FLASHMOE_FALBACK="warn"), FAIL, ("FLASHMOE_FALBACK", "FLASHMOE_FALLBACK", "has no effect")),
    ("variables", variables(FLASHMOE_CHECK_VALUES="yes"), FAIL, ("FLASHMOE_CHECK_VALUES=yes", "0, 1")),
    ("variables", variables(FLASHMOE_CACHE_DIR="/x"), PASS, ("doctor --variables",)),
    ("variables", variables(FLASHMOE_CPU_ISA="avx2048"), FAIL, ("FLASHMOE_CPU_ISA=avx2048", "avx2,")),
    ("variables", variables(FLASHMOE_CPU_ISA="avx2"), WARN, ()),
    ("variables", variables(FLASHMOE_KERNEL="sm91"), FAIL, ("FLASHMOE_KERNEL=sm91", "sm90")),
    ("extension", extension(CLONE, found=False), SKIP, ()),
    ("extension", extension(found=False), FAIL, ()),
    ("extension", extension(found=False, shown="/gone.so", error="no such file"), FAIL, ("/gone.so",)),
    ("extension", extension(error="provenance.json: FileNotFoundError"), WARN, ("provenance.json",)),
    ("extension", extension(damaged=True), FAIL, ("not an ELF file",)),
    ("extension", extension(), PASS, ()),
    ("loads", {"probe": NOT_LOADED}, FAIL, ("undefined symbol: aoti_torch_x", "flashmoe audit")),
    ("loads", {"probe": NO_TORCH}, SKIP, ()),  # torch is the cause, which the check above reports
    ("loads", {"probe": Probe()}, SKIP, ()),
    ("smoke", {"probe": NOT_LOADED}, SKIP, ()),
    ("smoke", {"probe": Probe()}, SKIP, ()),
    ("smoke", probe(smoke_ok=False, smoke_raised=True, smoke="ArgumentError: FLASHMOE_CPU_ISA is 'amx'"), FAIL, ("no number was wrong",)),
    ("smoke", probe(smoke_ok=False, smoke="cpu float16 S=65: error 4.7e+00"), FAIL, ("S=65", "report it")),
    ("name", {"shadows": ("flashmoe 0.0.1.dev0",)}, FAIL, (
        "another project", "pip uninstall flashmoe flashmoe-py; pip install --force-reinstall --no-deps flashmoe-kernels",
    )),
    ("several GPUs", {"driver": Driver()}, SKIP, ("NCCL 2.27.5", "neither peer access nor topology can be queried")),
    ("several GPUs", {}, PASS, ("NCCL 2.27.5; one GPU, so there is no peer",)),
    ("several GPUs", {"driver": TWO, "probe": NO_TORCH}, SKIP, ("not queried: torch was not imported",)),
    ("several GPUs", {"driver": TWO, "links": Links(topology=(("X", "NV18"), ("NV18", "X")))}, PASS, (
        "NCCL 2.27.5; 2 GPUs, peer access between all; all by NV18",
    )),
    ("several GPUs", {
        "driver": Driver(12080, (H100,) * 3),
        "links": Links(topology=(("X", "NV4", "SYS"), ("NV4", "X", "PIX"), ("SYS", "PIX", "X"))),
    }, PASS, ("0-1 NV4, 0-2 SYS, 1-2 PIX",)),
    ("several GPUs", {"driver": TWO, "links": Links(unreachable=((0, 1), (1, 0)))}, WARN, ("no peer access from 0 to 1, 1 to 0", "host's memory")),
    ("several GPUs", {"driver": TWO, "links": Links(peers_problem="CUDA error 3")}, WARN, ("peer access unknown (CUDA error 3)", "did not report")),
    ("several GPUs", {"driver": TWO, **probe(nccl=""), "links": Links(topology_problem="no nvidia-smi")}, WARN, (
        "topology unknown (no nvidia-smi)", "only through NCCL",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "verdict", "words"), CASES)
def test_each_state_of_a_machine(
    name: str, changes: dict[str, object], verdict: Verdict, words: tuple[str, ...]
) -> None:
    check = look(name, **changes)
    assert check.verdict is verdict, check
    message = "\n".join((check.found, check.expected, check.why, check.next_step))
    assert [word for word in words if word not in message] == []
    assert check.next_step or verdict is not FAIL


@pytest.mark.parametrize(
    ("problem", "fix"),
    [
        ("ModuleNotFoundError: No module named 'tomli'", "pip install tomli"),
        ("TableError: cannot read arch.toml", "reinstall"),
    ],
)
def test_an_incomplete_package_is_a_finding_not_a_crash(problem: str, fix: str) -> None:
    checks = {check.name: check for check in judge(GOOD, problem)}
    assert checks["package"].verdict is Verdict.FAIL
    assert fix in checks["package"].next_step
    assert checks["gpus"].verdict is Verdict.SKIP


@pytest.mark.parametrize(
    ("capability", "targets", "serves"),
    [
        ((9, 0), ("sm_80", "sm_90a", "compute_80"), "sm_90a"),
        ((9, 0), ("sm_80", "compute_80"), "compute_80"),
        ((9, 0), ("sm_80",), None),
        ((8, 7), ("sm_80", "sm_86", "sm_89", "compute_80"), "sm_86"),
        ((8, 0), ("sm_86", "compute_80"), "compute_80"),
        ((7, 5), ("sm_80", "compute_80"), None),
        ((7, 5), ("sm_75",), "sm_75"),
        ((10, 3), ("sm_100a", "compute_80"), "compute_80"),
        ((13, 0), ALL_TARGETS, "compute_80"),
        ((7, 0), ALL_TARGETS, None),
    ],
)
def test_which_binary_a_gpu_loads(capability: tuple[int, int], targets: tuple[str, ...], serves: str | None) -> None:
    found = serving_target(capability, [target for target in TABLES.targets if target.name in targets])
    assert (found.name if found else None) == serves


def test_exit_code_and_text() -> None:
    failed = Report("doctor", judge(replace(GOOD, torch=Package()), TABLES))
    assert failed.exit_code is ExitCode.FAILED
    text = render(failed, "0.1.0")
    assert "fix:      pip install 'torch>=2.10'" in text
    assert "doctor FAIL: " in text
    warned = Report("doctor", judge(replace(GOOD, variables={"LD_PRELOAD": "x"}), TABLES))
    assert warned.exit_code is ExitCode.OK
    assert "1 WARN" in render(warned, "0.1.0")


@pytest.mark.parametrize(("text", "parts"), [("2.10.0+cu128", (2, 10, 0)), ("2.11.0a0+git", (2, 11, 0)), ("x", ())])
def test_numbers_of_a_version(text: str, parts: tuple[int, ...]) -> None:
    assert judging.numbers(text) == parts
