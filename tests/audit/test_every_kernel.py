"""What is reported about a set of kernels, its targets, hashes and code, on made-up units and tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from test_every_check import BINARY, KERNEL, Told, told

from flashmoe_tools.audit import kernels
from flashmoe_tools.audit.cubin import CubinFacts
from flashmoe_tools.audit.embedded import Binary
from flashmoe_tools.audit.errors import NotElfError
from flashmoe_tools.audit.ptx import PtxEntry, PtxFacts
from flashmoe_tools.report import Check
from flashmoe_tools.tables import Target, load_tables


@dataclass(frozen=True)
class _Unit:
    """The attributes of a table's unit that the checks use."""

    dtype: str
    target: Any
    row: ClassVar[Any] = SimpleNamespace(dtypes=("f16", "bf16"), source="k.cu")
    entries: ClassVar[tuple[tuple[str, str], ...]] = (("", "k_full"),)

    @property
    def name(self) -> str:
        return f"k_{self.dtype}"


TARGETS = {name: Target(name, (f"gpu of {name}",)) for name in ("sm_75", "sm_80", "compute_80")}
KERNEL_TABLES: Any = SimpleNamespace(
    targets=tuple(TARGETS.values()),
    target=TARGETS.__getitem__,
    units=lambda: (_Unit("f16", TARGETS["sm_80"]), _Unit("f16", TARGETS["compute_80"])),
)


def _held(*names: str) -> list[Binary]:
    """Binaries with these labels."""
    return [replace(BINARY, name=label.split(".")[0], target=label.split(".")[1]) for label in names]


@pytest.mark.parametrize(("held", "wanted", "found"), [
    (("k.sm_80", "k.compute_80"), ("sm_80", "compute_80"), [("PASS", "targets", "compute_80, sm_80")]),
    (("k.sm_80", "k.compute_80"), ("sm_75", "sm_80", "compute_80"), [("PASS", "targets", "compute_80, sm_80")]),
    (("k.sm_80",), ("sm_80", "compute_80"), [("FAIL", "missing architecture: compute_80", "binaries for sm_80")]),
    (("k.sm_80", "k.compute_80", "k.sm_1"), ("sm_80", "compute_80"), [("FAIL", "targets: sm_1", "binaries for sm_1")]),
    (("k.sm_80",), ("sm_80",), [("WARN", "targets", "a partial build: it declares sm_80 and leaves out compute_80")]),
    (("k.sm_80",), ("compute_80",), [("FAIL", "missing architecture: compute_80", "binaries for sm_80"),
     ("WARN", "targets", "a partial build: it declares compute_80 and leaves out sm_80")]),
])  # fmt: skip
def test_targets_of_a_build(held: tuple[str, ...], wanted: tuple[str, ...], found: Told) -> None:
    assert told(list(kernels._check_targets(_held(*held), KERNEL_TABLES, wanted))) == found


def test_binaries_that_cannot_be_read_or_were_edited() -> None:
    error = replace(BINARY, facts=None, error=NotElfError("no ELF file", "build"))
    rows: list[tuple[Callable[[Sequence[Binary]], list[Check]], Binary, Told, Told]] = [
        (kernels._check_readable, error, [("PASS", "embedded binaries", "1, all readable")],
         [("FAIL", "unreadable binary: k.sm_80", "no ELF file")]),
        (kernels._check_arch, replace(BINARY, target="sm_90a"), [("PASS", "architecture of each binary", "equal to its declared target")],
         [("FAIL", "architecture: k.sm_90a", "code for sm_80")]),
        (kernels._check_hashes, replace(BINARY, sha256="b"), [("PASS", "sha256 of each binary", "equal to the index")],
         [("FAIL", "edited binary: k.sm_80", f"sha256 {'a' * 16}...")]),
    ]  # fmt: skip
    for check, bad, sound, found in rows:
        assert (told(check([BINARY])), told(check([BINARY, bad]))) == (sound, found)
    assert told(kernels._check_arch([replace(error, target="sm_90a")]))[0][0] == "PASS"


@pytest.mark.parametrize(("held", "found", "why"), [
    (("k_f16.sm_80", "k_bf16.sm_80"), [("PASS", "kernel set", "2 units, exactly the table's")], ""),
    (("k_f16.sm_80",), [("FAIL", "missing kernel: k_bf16 for sm_80", "no binary k_bf16 for sm_80")],
     "the unit for bf16 was not compiled or not embedded; f16 is there"),
    (("x.sm_80", "k_f16.sm_80", "k_bf16.sm_80"), [("FAIL", "kernel outside the table: x for sm_80", "x for sm_80")], ""),
    (("k_f16.sm_80", "k_bf16.sm_80", "k_f16.sm_80"), [("FAIL", "kernel twice: k_f16 for sm_80", "2 binaries")], ""),
    (("x.sm_80",), [("FAIL", f"missing kernel: k_{dtype} for sm_80", f"no binary k_{dtype} for sm_80") for dtype in ("bf16", "f16")] +
     [("FAIL", "kernel outside the table: x for sm_80", "x for sm_80")],
     "Cause: the unit was not compiled or not embedded"),
    (("k_f16.sm_90",), [("FAIL", "kernel outside the table: k_f16 for sm_90", "k_f16 for sm_90")], ""),
])  # fmt: skip
def test_the_set_of_kernels(held: tuple[str, ...], found: Told, why: str) -> None:
    """A target without any binary is reported by another check."""
    expected: Any = {(f"k_{dtype}", "sm_80"): _Unit(dtype, TARGETS["sm_80"]) for dtype in ("f16", "bf16")}
    checks = kernels._check_set(_held(*held), expected)
    assert told(checks) == found
    assert checks[0].why.endswith(why)


@pytest.mark.parametrize(("binary", "words"), [
    (BINARY, ""), (replace(BINARY, target="sm_75"), ""), (replace(BINARY, target="sm_75", entries=("k_bf16",)), "k_bf16"),
    (replace(BINARY, target="sm_80", entries=("k_bf16",)), ""),
    (replace(BINARY, target="sm_1", entries=("k_bf16",)), ""),
    (replace(BINARY, target="sm_75", facts=CubinFacts("sm_75", (), ("f_BFloat16",))), "f_BFloat16"),
    (replace(BINARY, target="sm_75", facts=CubinFacts("sm_75", (replace(KERNEL, name="bf16_k"),), ())), "bf16_k"),
    (replace(BINARY, target="sm_75", facts=None), ""),
    (replace(BINARY, target="sm_75", facts=PtxFacts("sm_75", "8.7", (PtxEntry("p", 0, 0, 0, 0, True),))), "p (bf16 instructions)"),
    (replace(BINARY, target="sm_75", facts=PtxFacts("sm_75", "8.7", (PtxEntry("p", 0, 0, 0, 0, False),))), ""),
])  # fmt: skip
def test_bf16_where_there_is_none(binary: Binary, words: str) -> None:
    found = told(kernels._check_forbidden([binary], KERNEL_TABLES))
    expected = (
        ("FAIL", f"bf16 for sm_75: {binary.label}", words)
        if words
        else ("PASS", "forbidden code", "no bf16 for targets below 8.0")
    )
    assert found == [expected]


def test_all_checks_of_kernels() -> None:
    """With the complete table, and with declared targets."""
    tables = load_tables()
    every = {check.name for check in kernels.audit_kernels([BINARY], tables, None).checks}
    some = {check.name for check in kernels.audit_kernels([BINARY], tables, ("sm_80",)).checks}
    assert "missing architecture: sm_90a" in every - some
    assert {"targets", "kernel twice: k for sm_80"} & some == {"targets"}
    assert len(kernels.audit_kernels([BINARY], tables, ()).launches) == len(tables.target("sm_80").gpus)
