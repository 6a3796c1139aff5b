"""Records emulated launches of the forward and combine kernels that an H100 runs, with their cubins, for replay on a GPU
(on_gpu.py), to measure how well the two agree.

python -m flashmoe_build.emulation.hardware FOLDER [--kernel TEXT]
python FOLDER/on_gpu.py FOLDER --json agreement.json          on a machine with an sm_90 GPU
"""

import argparse
import ctypes
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flashmoe.errors import BuildError, ExitCode
from flashmoe_build.compile.cache import Cache
from flashmoe_build.compile.device import compile_unit
from flashmoe_build.compile.nvrtc import compile_ptx
from flashmoe_build.compile.ptxas import assemble
from flashmoe_build.compile.toolchain import find_toolchain
from flashmoe_build.emulation import on_gpu
from flashmoe_build.emulation.build import CACHE, REPOSITORY, Options, library
from flashmoe_build.emulation.cases import runners
from flashmoe_build.emulation.compare import DTYPES
from flashmoe_build.emulation.machine import TENSOR_CORES, Geometry, KernelLibrary, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.runner import bind, execute, geometry
from flashmoe_tools.operations.attention.emulation.problem import Problem, Shape, Values
from flashmoe_tools.tables import Tables, Unit, load_tables

TARGET = "sm_90a"
# The operations whose launches are recorded. The others multiply with the same instructions, in the same order.
OPERATIONS = ("attention_forward", "attention_combine")
PROBE = REPOSITORY / "tests" / "emulation" / "kernels" / "probe.cuh"
PROBE_COUNT = 64


def problems(unit: Unit) -> list[Problem]:
    """One problem per mask: ordinary scores over several tiles, and a maximum that keeps changing. Split kernels divide the keys
    between three blocks; the combine kernel's own problem covers merging their two results."""
    dim = unit.row.axes["head_dim"]
    if unit.row.operation == "attention_combine":
        return [
            Problem(Shape(1, 2, 1, 33, 64, columns), unit.dtype, False, data_seed=columns, splits=splits)
            for columns, splits in ((64, 3), (128, 32), (256, 7))
        ]
    splits = 3 if unit.row.options.get("split") else 1
    sizes = {"causal": (193, 257, Values.NORMAL), "full": (65, 199, Values.RISING)}
    return [
        Problem(
            Shape(1, 2, 1, seq_q, seq_k, dim), unit.dtype, mask == "causal", values=values, data_seed=7, splits=splits
        )
        for mask, (seq_q, seq_k, values) in sizes.items()
        if mask in unit.row.words["mask"]
    ]


def _maps(unit: Unit, problem: Problem) -> list[tuple[str, dict[str, Any]]]:
    """The four tensor maps of the sm90 kernels on contiguous tensors (csrc/attention/forward/sm90/tensor_map.h)."""
    s = problem.shape

    def content(rows: int, heads: int, box_rows: int) -> dict[str, Any]:
        row = 2 * s.head_dim
        strides = [row if rows > 1 else 16, row * rows if heads > 1 else 16, row * rows * heads if s.batch > 1 else 16]
        return {"dims": [s.head_dim, rows, heads, s.batch], "strides": strides, "box": [64, box_rows, 1, 1]}

    query, key = content(s.seq_q, s.heads_q, 64), content(s.seq_k, s.heads_kv, unit.row.block_n)
    return [("q", query), ("k", key), ("v", key), ("out", query)]


def unwritten(like: torch.Tensor) -> torch.Tensor:
    """A NaN tensor of that shape and dtype that stores a single value in a file."""
    return torch.full((1,), float("nan"), dtype=like.dtype).expand(like.shape)


class _Nowhere:
    """Replaces the library when a launch is described but not run: every address is null until on_gpu.py fills it in."""

    def add_buffer(self, *_: object, **__: object) -> int:
        return 0

    def expect_from_preceding_grid(self, address: int) -> int:
        return address


def record(unit: Unit, problem: Problem, cubin: str) -> dict[str, Any]:
    """One launch, its emulated results with an H100's tensor cores, and what on_gpu.py needs to repeat it."""
    trial = runners()[unit.row.operation].trial(unit, problem)
    (launch,) = trial.launches
    outcome = execute(unit, trial, Settings(core=TENSOR_CORES["h100"]), Options())
    if not outcome.passed:
        raise BuildError(outcome.explain())
    kind = structure(unit.row.descriptor.params, Options().roots())
    buffers = dict(launch.buffers())
    results = {name: tensor for name, tensor in trial.results.items() if name in buffers}
    tensors = {name: unwritten(b.tensor) if name in results else b.tensor for name, b in buffers.items()}
    is_split = "out_partial" in results  # a split kernel does not write the output
    if is_split:
        tensors["out"] = unwritten(tensors["out"])
    shape = geometry(unit, launch)
    mask = "causal" if problem.causal else "full"
    is_forward = unit.row.operation == "attention_forward"
    values = problem.values.value if is_forward else f"d{problem.shape.head_dim}-s{problem.splits}"
    return {
        "name": f"{unit.name}-{mask}-{values}",
        "symbol": outcome.symbol,
        "cubin": cubin,
        "grid": shape.grid,
        "threads": shape.threads,
        "shared": shape.shared_bytes,
        "params": bytes(bind(kind, launch.values, _Nowhere())),  # type: ignore[arg-type]
        "pointers": [(getattr(kind, name).offset, name) for name in tensors],
        "maps": _maps(unit, problem) if unit.row.descriptor.tensor_maps is not None else [],
        "tensors": tensors,
        "expected": results,
        "element": str(DTYPES[problem.dtype]).removeprefix("torch."),
    }


class ProbeParams(ctypes.Structure):
    """probe::Params of tests/emulation/kernels/probe.cuh."""

    _fields_ = [*((name, ctypes.c_uint64) for name in "abcd"), ("count", ctypes.c_int32)]


def probe_inputs(name: str) -> dict[str, torch.Tensor]:
    """Inputs whose exponents differ widely, so that every bit of the alignment matters."""
    generator = torch.Generator().manual_seed(23)

    def spread(*shape: int, width: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * torch.exp2(
            torch.rand(shape, generator=generator) * width - width / 2
        )

    if name in ("probe_exp2", "probe_lg2", "probe_rcp"):
        values = torch.randn(65536, generator=generator) * 12
        return {"c": values if name == "probe_exp2" else values.abs() + 1e-6}
    dtype = torch.bfloat16 if "bf16" in name else torch.float16
    rows, columns, depth = (64, 64, 16) if "wgmma" in name else (16, 8, 8 if "k8" in name else 16)
    return {
        "a": spread(PROBE_COUNT, rows, depth, width=8).to(dtype),
        "b": spread(PROBE_COUNT, columns, depth, width=8).to(dtype),
        "c": spread(PROBE_COUNT, rows, columns, width=12),
    }


PROBES = {
    **dict.fromkeys(("probe_mma_f16", "probe_mma_bf16", "probe_mma_k8_f16"), 32),
    **dict.fromkeys(("probe_wgmma_f16", "probe_wgmma_bf16", "probe_exp2", "probe_lg2", "probe_rcp"), 128),
}


def probe_library() -> KernelLibrary:
    text = PROBE.read_text(encoding="utf-8")
    entries = "\n".join(
        f'extern "C" void emulation_entry_{name}(const void* const* arguments) '
        f"{{ {name}(*static_cast<const probe::Params*>(arguments[0])); }}"
        for name in PROBES
    )
    return KernelLibrary(library("probe", f"{text}\n{entries}\n", "sm90", Options()))


def record_probe(emulated: KernelLibrary, name: str, cubin: str) -> dict[str, Any]:
    """One instruction on many inputs, emulated with an H100's tensor cores."""
    given = probe_inputs(name)
    out = torch.zeros_like(given["c"])
    count = given["c"].numel() if "a" not in given else PROBE_COUNT
    params = ProbeParams(count=count)
    emulated.clear_buffers()
    for key, tensor in {**given, "d": out}.items():
        size = tensor.numel() * tensor.element_size()
        address = emulated.add_buffer(tensor.data_ptr(), size, writable=key == "d", initialised=key != "d", name=key)
        setattr(params, key, address)
    launch = Geometry(4, PROBES[name], 64 * 128, 128)
    report = emulated.launch(name, (ctypes.addressof(params),), launch, Settings(core=TENSOR_CORES["h100"]))
    emulated.clear_buffers()
    if report.failure is not None:
        raise BuildError(str(report.failure))
    return {
        "name": name,
        "symbol": name,
        "cubin": cubin,
        "grid": launch.grid,
        "threads": launch.threads,
        "shared": launch.shared_bytes,
        "params": bytes(ProbeParams(count=count)),
        "pointers": [(getattr(ProbeParams, key).offset, key) for key in (*given, "d")],
        "maps": [],
        "tensors": {**given, "d": torch.zeros_like(given["c"])},
        "expected": {"d": out},
    }


def probe_cubin(unit: Unit) -> bytes:
    """The probe kernels for the GPU, compiled for the target of ``unit``."""
    toolchain, source = find_toolchain(), PROBE.read_text(encoding="utf-8")
    virtual = unit.target.name.replace("sm_", "compute_")
    ptx = compile_ptx(
        source, "probe", virtual, csrc=REPOSITORY / "csrc", toolchain=toolchain, cache=Cache(CACHE / "cubins")
    )
    return assemble(ptx.text, "probe", unit.target.name, toolchain).cubin


def gpu_units(tables: Tables, selected: str) -> list[Unit]:
    """Every kernel of the recorded operations that an H100 runs."""
    units = tables.units((TARGET,))
    return [unit for unit in units if unit.row.operation in OPERATIONS and selected in unit.name]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_build.emulation.hardware", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernel", default="", metavar="TEXT", help="kernels whose name contains TEXT (all)")
    arguments = parser.parse_args(argv)
    units = gpu_units(load_tables(), arguments.kernel)
    if not units:
        print(f"no kernel for {TARGET} matches {arguments.kernel!r}", file=sys.stderr)
        return ExitCode.NOTHING_CHECKED
    arguments.folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(on_gpu.__file__, arguments.folder / "on_gpu.py")
    (arguments.folder / "probe.cubin").write_bytes(probe_cubin(units[0]))
    emulated = probe_library()
    for name in PROBES:
        torch.save(record_probe(emulated, name, "probe.cubin"), arguments.folder / f"{name}.pt")
    cache = Cache(CACHE / "cubins")
    for unit in units:
        compiled = compile_unit(unit, root=REPOSITORY, toolchain=find_toolchain(), cache=cache)
        (arguments.folder / unit.binary_name).write_bytes(compiled.output)
        for problem in problems(unit):
            found = record(unit, problem, unit.binary_name)
            torch.save(found, arguments.folder / f"{found['name']}.pt")
            print(found["name"], flush=True)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
