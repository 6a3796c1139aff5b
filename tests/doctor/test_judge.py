"""Every failure of a machine, made up: the verdict, what it names and the fix it gives."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"machine": "riscv64"}, "x86-64 and AArch64"),
        ({"system": "Darwin"}, "x86-64"),
        ({"glibc": "2.17"}, "manylinux_2_28"),
        ({"glibc": ""}, "manylinux_2_28"),
        ({"implementation": "pypy"}, "no wheels"),
    ],
)
def test_python_fails(changes: dict[str, str], says: str) -> None:
    check = look("python", python=replace(GOOD.python, **changes))
    assert check.verdict is Verdict.FAIL
    assert says in check.why
    assert check.next_step


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


def test_a_newer_python_warns_in_a_checkout_only() -> None:
    newer = replace(GOOD.python, version=(3, 13, 0))
    assert look("python", python=newer).verdict is Verdict.WARN
    assert look("python", python=newer, lock=Lock(checkout=False)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("versions", "verdict", "says"),
    [
        ((), Verdict.FAIL, "not installed"),
        (("2.8.0",), Verdict.FAIL, "2.8.0"),
        (("2.9.1+cu126",), Verdict.FAIL, "2.9.1"),
        (("2.10.0", "2.8.0"), Verdict.FAIL, "2.10.0 and 2.8.0"),
        (("2.10.0+cu128",), Verdict.PASS, "CUDA 12.8"),
        (("2.13.0",), Verdict.PASS, "2.13.0"),
        (("3.0.0a1",), Verdict.PASS, "3.0.0a1"),
    ],
)
def test_torch(versions: tuple[str, ...], verdict: Verdict, says: str) -> None:
    check = look(
        "torch",
        torch=Package(versions),
        probe=replace(GOOD.probe, torch_version=(*versions, "")[0]) if versions else Probe(),
    )
    assert check.verdict is verdict
    assert says in check.found
    assert (check.next_step != "") == (verdict is Verdict.FAIL)


def test_a_cpu_torch_beside_a_gpu_warns() -> None:
    assert look("torch", torch_cuda="").verdict is Verdict.WARN
    assert look("torch", torch_cuda="", driver=Driver()).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("versions", "lock", "verdict"),
    [
        ((), "test", Verdict.SKIP),
        (("1.26.4",), "test", Verdict.PASS),
        (("2.1.0",), "test", Verdict.FAIL),
        (("2.1.0",), "", Verdict.PASS),
        (("1.26.4", "2.1.0"), "", Verdict.FAIL),
    ],
)
def test_numpy(versions: tuple[str, ...], lock: str, verdict: Verdict) -> None:
    check = look("numpy", numpy=Package(versions), lock=Lock(checkout=bool(lock), name=lock))
    assert check.verdict is verdict
    if verdict is Verdict.FAIL:
        assert check.why
        assert check.next_step


@pytest.mark.parametrize(
    ("driver", "verdict", "says"),
    [
        (Driver(), Verdict.SKIP, "no libcuda.so.1"),
        (Driver(12080, error="CUDA_ERROR_NO_DEVICE"), Verdict.SKIP, "CUDA 12.8, no GPU"),
        (Driver(12080, error="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), Verdict.FAIL, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        (Driver(11080, (H100,)), Verdict.FAIL, "CUDA 11.8"),
        (Driver(12040, (H100,)), Verdict.WARN, "CUDA 12.4"),
        (Driver(13000, (H100,)), Verdict.PASS, "CUDA 13.0"),
    ],
)
def test_driver(driver: Driver, verdict: Verdict, says: str) -> None:
    check = look("driver", driver=driver)
    assert check.verdict is verdict
    assert says in check.found


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


def test_a_gpu_without_kernels_fails_and_names_the_build_that_helps() -> None:
    check = look("gpus", **gpu_with("sm_75", "sm_80"))
    assert check.verdict is Verdict.FAIL
    assert "none of them runs on NVIDIA H100" in check.why
    assert "FLASHMOE_ARCHS=90 ./nox -s build" in check.next_step
    assert "this build holds sm_75, sm_80" in check.expected


def test_a_gpu_served_by_ptx_warns() -> None:
    check = look("gpus", **gpu_with("sm_80", "compute_80"))
    assert check.verdict is Verdict.WARN
    assert "the driver compiles at the first call" in check.why


def test_gpus_without_an_extension_prove_nothing() -> None:
    assert look("gpus", **gpu_with()).verdict is Verdict.SKIP
    assert look("gpus", driver=Driver()).verdict is Verdict.SKIP


@pytest.mark.parametrize(
    ("version", "checkout", "verdict"),
    [
        ("12.2.0", True, Verdict.PASS),
        ("11.4.0", True, Verdict.PASS),
        ("10.2.1", True, Verdict.FAIL),
        ("", True, Verdict.FAIL),
        ("", False, Verdict.SKIP),
    ],
)
def test_compiler(version: str, checkout: bool, verdict: Verdict) -> None:
    check = look("g++", compiler=Compiler("g++", version), lock=Lock(checkout=checkout))
    assert check.verdict is verdict
    assert (check.next_step != "") == (verdict is Verdict.FAIL)


def test_lock_drift() -> None:
    drifted = look("lock", lock=Lock(True, "test", "numpy is installed more than once (1.26.4 and 2.1.0)"))
    assert drifted.verdict is Verdict.FAIL
    assert "numpy is installed more than once" in drifted.found
    assert look("lock", lock=Lock(checkout=True)).verdict is Verdict.SKIP
    assert look("lock", lock=Lock(checkout=False)).verdict is Verdict.SKIP


def test_no_variable_is_needed_and_ours_are_named() -> None:
    check = look("variables", variables={})
    assert check.verdict is Verdict.PASS
    assert "none is required: no CUDA toolkit" in check.expected
    assert look("variables", variables={"CUDA_HOME": "/x", "LD_LIBRARY_PATH": "/y"}).verdict is Verdict.PASS
    assert look("variables", variables={"LD_PRELOAD": "/x.so"}).verdict is Verdict.WARN
    forced = look("variables", variables={"FLASHMOE_KERNEL": "sm75"})
    assert forced.verdict is Verdict.WARN
    assert "FLASHMOE_KERNEL=sm75" in forced.found
    assert forced.next_step == "unset FLASHMOE_KERNEL"


@pytest.mark.parametrize(
    ("extension", "checkout", "verdict"),
    [
        (Extension(found=False), True, Verdict.SKIP),
        (Extension(found=False), False, Verdict.FAIL),
        (Extension(found=False, shown="/gone.so", error="no such file"), False, Verdict.FAIL),
        (Extension(found=True, shown="x", error="provenance.json: FileNotFoundError"), False, Verdict.WARN),
        (Extension(found=True, shown="x", damaged=True), False, Verdict.FAIL),
        (Extension(found=True, shown="x"), False, Verdict.PASS),
    ],
)
def test_extension(extension: Extension, checkout: bool, verdict: Verdict) -> None:
    assert look("extension", extension=extension, lock=Lock(checkout=checkout)).verdict is verdict


def test_a_load_failure_keeps_its_words() -> None:
    probe = Probe(ran=True, torch_version="2.10.0", load_error="ExtensionError: undefined symbol: aoti_torch_x")
    check = look("loads", probe=probe)
    assert check.verdict is Verdict.FAIL
    assert "undefined symbol: aoti_torch_x" in check.found
    assert look("smoke", probe=probe).verdict is Verdict.SKIP
    assert "flashmoe audit" in check.next_step


def test_a_torch_that_does_not_import_is_not_blamed_on_the_extension() -> None:
    probe = Probe(ran=True, problem="ImportError: libcudart.so.12: cannot open shared object file")
    check = look("torch", probe=probe)
    assert check.verdict is Verdict.FAIL
    assert "libcudart.so.12" in check.found
    assert "import torch" in check.next_step
    assert look("loads", probe=probe).verdict is Verdict.SKIP


def test_a_torch_other_than_the_installed_one() -> None:
    check = look("torch", probe=replace(GOOD.probe, torch_version="2.13.0+cpu"))
    assert (check.verdict, check.found) == (Verdict.FAIL, "2.13.0+cpu is imported, 2.10.0 is installed")
    assert look("torch", probe=replace(GOOD.probe, torch_version="2.10.0+cu128")).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("FLASHMOE_FALLBACK", "foo", "warn"),
        ("FLASHMOE_CPU_ISA", "avx2048", "avx2"),
        ("FLASHMOE_KERNEL", "sm91", "sm90"),
    ],
)
def test_a_misspelt_variable_fails_with_what_it_may_be(name: str, wrong: str, right: str) -> None:
    check = look("variables", variables={name: wrong})
    assert check.verdict is Verdict.FAIL
    assert right in check.expected.split(", ")
    assert check.found == f"{name}={wrong}"
    assert look("variables", variables={name: right}).verdict in (Verdict.PASS, Verdict.WARN)


def test_a_refused_call_is_no_wrong_number() -> None:
    probe = replace(GOOD.probe, smoke_ok=False, smoke_raised=True, smoke="ArgumentError: FLASHMOE_CPU_ISA is 'amx'")
    check = look("smoke", probe=probe)
    assert check.verdict is Verdict.FAIL
    assert "report" not in check.next_step


def test_a_wrong_answer_fails() -> None:
    probe = replace(GOOD.probe, smoke_ok=False, smoke="cpu float16 S=65: error 4.7e+00")
    check = look("smoke", probe=probe)
    assert check.verdict is Verdict.FAIL
    assert "S=65" in check.found


def test_nothing_tried_is_not_a_pass() -> None:
    assert look("loads", probe=Probe()).verdict is Verdict.SKIP
    assert look("smoke", probe=Probe()).verdict is Verdict.SKIP


def test_a_package_of_another_project_in_our_folder_fails() -> None:
    check = look("name", shadows=("flashmoe 0.0.1.dev0",))
    assert check.verdict is Verdict.FAIL
    assert "another project" in check.why
    assert check.next_step == (
        "pip uninstall flashmoe flashmoe-py; pip install --force-reinstall --no-deps flashmoe-kernels"
    )


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


TWO = Driver(12080, (H100, H100))
NVLINK = Links(topology=(("X", "NV18"), ("NV18", "X")))


def test_gpus_that_reach_each_other_pass() -> None:
    check = look("several GPUs", driver=TWO, links=NVLINK)
    assert check.verdict is Verdict.PASS
    assert check.found == "NCCL 2.27.5; 2 GPUs, peer access between all; all by NV18"
    mixed = Links(topology=(("X", "NV4", "SYS"), ("NV4", "X", "PIX"), ("SYS", "PIX", "X")))
    check = look("several GPUs", driver=Driver(12080, (H100,) * 3), links=mixed)
    assert check.found.endswith("0-1 NV4, 0-2 SYS, 1-2 PIX")


def test_without_a_gpu_doctor_says_what_it_could_not_ask() -> None:
    check = look("several GPUs", driver=Driver())
    assert check.verdict is Verdict.SKIP
    assert "neither peer access nor topology could be asked" in check.why
    assert check.found == "NCCL 2.27.5"
    assert look("several GPUs").found == "NCCL 2.27.5; one GPU, so there is no peer"


def test_a_torch_that_was_not_imported_is_not_said_to_lack_nccl() -> None:
    check = look("several GPUs", driver=TWO, probe=Probe(ran=True, problem="RuntimeError: broken"))
    assert check.verdict is Verdict.SKIP
    assert check.found == "not asked: torch was not imported"


@pytest.mark.parametrize(
    ("links", "nccl", "says", "why"),
    [
        (Links(unreachable=((0, 1), (1, 0))), "2.27.5", "no peer access from 0 to 1, 1 to 0", "host's memory"),
        (Links(peers_problem="CUDA error 3"), "2.27.5", "peer access unknown (CUDA error 3)", "did not say"),
        (Links(topology_problem="no nvidia-smi"), "", "topology unknown (no nvidia-smi)", "NCCL alone"),
    ],
)
def test_gpus_that_do_not_reach_each_other_warn(links: Links, nccl: str, says: str, why: str) -> None:
    check = look("several GPUs", driver=TWO, links=links, probe=replace(GOOD.probe, nccl=nccl))
    assert check.verdict is Verdict.WARN
    assert says in check.found
    assert why in check.why
    assert check.next_step
