"""Embedded kernels: missing dtypes or targets, bf16 on hardware without it, tiles that do not fit, damaged data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from audit_builders import (
    EMBED,
    Options,
    Row,
    Workshop,
    audit,
    device_code,
    failures,
    kernel_source,
    named,
    only_failure,
    replace,
    row_of,
)

from flashmoe_tools.audit.resources import MAX_PARAM_BYTES, check_launches
from flashmoe_tools.report import Report, Verdict
from flashmoe_tools.tables import Tables, Unit


@dataclass(frozen=True)
class Lab:
    """A valid library's rows, and the audit of a library with other rows."""

    workshop: Workshop
    rows: tuple[Row, ...]
    tables: Tables

    def unit(self, dtype: str, target: str) -> Unit:
        return next(u for u in self.tables.units() if u.dtype == dtype and u.target.name == target)

    def with_row(self, new: Row) -> list[Row]:
        """The rows with the row of the same name and target replaced."""
        return [new if (row.name, row.target) == (new.name, new.target) else row for row in self.rows]

    def first(self, **changes: Any) -> list[Row]:
        """The rows with the first one changed."""
        return [replace(self.rows[0], **changes), *self.rows[1:]]

    def compiled(self, dtype: str, target: str, arch: str = "", **source: Any) -> list[Row]:
        """The rows with one unit's binary compiled from another source or for another architecture."""
        unit = self.unit(dtype, target)
        content = device_code(kernel_source([s for _, s in unit.entries]), arch) if arch else b""
        return self.with_row(replace(row_of(unit), content=content) if arch else row_of(unit, **source))

    def extra(self, name: str, target: str) -> list[Row]:
        """The rows plus one for a kernel that is in no table."""
        symbol = f"flashmoe_{name}_full"
        return [*self.rows, Row(name, target, device_code(kernel_source([symbol]), target), (symbol,), 0, 128)]

    def judge(self, rows: Sequence[Row], **options: Any) -> Report:
        return audit(self.workshop.library(rows, **options), tables=self.tables)


@pytest.fixture
def lab(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> Lab:
    return Lab(workshop, rows, tables)


def edited(row: Row) -> Row:
    """Changes one byte of machine code; the index still has the old sha256."""
    place = len(row.content) // 2
    content = row.content[:place] + bytes([row.content[place] ^ 1]) + row.content[place + 1 :]
    return replace(row, content=content, sha256=row.digest)


D64 = "attention_forward_sm80_{}_d64"
SPILLING = "float many[100]; for (int i = 0; i < 100; ++i) many[i] = out[i]; out[0] = many[n];"
# Fault: the rows (and options) of the library, the failure's name, and words of the failure.
FAULTS: dict[str, tuple[Callable[[Lab], Any], str, tuple[str, ...]]] = {
    "F5, a dtype is missing": (
        lambda lab: [row for row in lab.rows if (row.name, row.target) != (D64.format("bf16"), "sm_80")],
        f"missing kernel: {D64.format('bf16')} for sm_80",
        ("the unit for bf16 was not compiled or not embedded; f16 is there", f"The table promises {D64.format('bf16')}"),
    ),
    "a target is missing": (
        lambda lab: ([row for row in lab.rows if row.target != "sm_90a"], {"targets": ["sm_80", "sm_90a", "compute_80"]}),
        "missing architecture: sm_90a",
        ("On sm90 the first call would fail",),
    ),
    "outside the table": (
        lambda lab: lab.extra("attention_forward_sm80_f16_d32", "sm_80"),
        "kernel outside the table: attention_forward_sm80_f16_d32 for sm_80",
        (),
    ),
    "F10, bf16 for sm_75": (
        lambda lab: lab.extra("attention_forward_sm75_bf16_d64", "sm_75"),
        "bf16 for sm_75",
        ("flashmoe_attention_forward_sm75_bf16_d64_full", "Compute capability 7.5 has no bf16 arithmetic"),
    ),
    "another architecture": (
        lambda lab: lab.compiled("f16", "sm_80", "sm_86"),
        f"architecture: {D64.format('f16')}.sm_80",
        ("code for sm_86", "code for sm_80"),
    ),
    "without the architecture's own features": (
        lambda lab: lab.compiled("f16", "sm_90a", "sm_90"),
        f"architecture: {D64.format('f16')}.sm_90a",
        ("code for sm_90", "code for sm_90a"),
    ),
    "edited": (
        lambda lab: ([edited(lab.rows[0]), *lab.rows[1:]], {"stated": lab.rows}),
        "edited binary: ",
        ("changed after the build",),
    ),
    "edited with its index": (
        lambda lab: ([replace(edited(lab.rows[0]), sha256=""), *lab.rows[1:]], {"stated": lab.rows}),
        "provenance: ",
        ("edited after the build, index included",),
    ),
    "promised by the provenance": (
        lambda lab: (lab.rows[:-1], {"stated": lab.rows}),
        "provenance: ",
        ("not embedded",),
    ),
    "unknown to the provenance": (
        lambda lab: (lab.rows, {"stated": lab.rows[:-1], "targets": list(dict.fromkeys(row.target for row in lab.rows))}),
        "provenance: ",
        ("embedded",),
    ),
    "another entry in the index": (
        lambda lab: lab.first(entries=(*lab.rows[0].entries[:-1], "flashmoe_something_else")),
        "index entries: ",
        ("flashmoe_something_else",),
    ),
    "a target that no table has": (
        lambda lab: [*lab.rows, replace(lab.rows[0], target="sm_99")],
        "targets: sm_99",
        ("No GPU in the table can load it",),
    ),
    "twice": (lambda lab: ([*lab.rows, lab.rows[0]], {"stated": lab.rows}), "kernel twice: ", ()),
    "launch bounds below the block": (
        lambda lab: lab.compiled("f16", "sm_80", threads=64),
        "launch bounds: ",
        ("at most 64 threads (sm_80)",),
    ),
    "other threads than the table's": (lambda lab: lab.first(threads=96), "threads: ", ()),
    **{
        f"local memory, {target}": (
            lambda lab, target=target: lab.compiled("f16", target, body=SPILLING),  # type: ignore[misc]
            "local memory: ",
            (f"400 bytes per thread for {target}",),
        )
        for target in ("sm_80", "sm_90a", "compute_80")
    },
    "parameters of another layout": (
        lambda lab: lab.compiled("f16", "sm_90a", parameters="float* out, int n, long more, long still_more"),
        "parameters: attention_forward_sm80",
        ("12 bytes in", "stale cache"),
    ),
    "parameters over the limit": (
        lambda lab: lab.compiled("f16", "sm_90a", parameters="float* out, int n, " + ", ".join(
            f"double4 d{index}" for index in range(MAX_PARAM_BYTES // 32 + 1)
        )),
        "",
        (f"at most {MAX_PARAM_BYTES}",),
    ),
    "no cubin": (lambda lab: lab.first(content=b"not a cubin at all" * 8), "unreadable binary: ", ("is not an ELF file",)),
    "half a cubin": (
        lambda lab: lab.first(content=lab.rows[0].content[: len(lab.rows[0].content) // 2]),
        "unreadable binary: ",
        ("is cut short",),
    ),
}  # fmt: skip
# A library with one of these faults has only that failure.
ALONE = {"F5, a dtype is missing", "outside the table", "another architecture", "without the architecture's own features",
         "edited with its index", "unknown to the provenance", "other threads than the table's",
         "parameters of another layout"}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(lab: Lab, fault: str) -> None:
    make, name, words = FAULTS[fault]
    made = make(lab)
    rows, options = made if isinstance(made, tuple) and isinstance(made[-1], dict) else (made, {})
    report = lab.judge(rows, **options)
    told = ["\n".join((check.found, check.expected, check.why)) for check in failures(report) if name in check.name]
    assert named(report, name)
    assert any(all(word in text for word in words) for text in told), told
    assert len(failures(report)) == 1 or fault not in ALONE, [check.name for check in failures(report)]


def test_a_partial_build_that_says_so_is_a_warning(lab: Lab) -> None:
    kept = [row for row in lab.rows if row.target == "sm_90a"]
    library = lab.workshop.library(kept)
    report = audit(library, tables=lab.tables)
    assert report.verdict is Verdict.WARN
    assert "leaves out compute_80, sm_80" in next(c for c in report.checks if c.verdict is Verdict.WARN).found
    targets = Options(targets=("sm_80", "sm_90a"))
    assert named(audit(library, targets, lab.tables), "missing architecture: sm_80")


def test_f2_entry_never_instantiated(lab: Lab) -> None:
    unit = lab.unit("bf16", "sm_80")
    lost, kept = unit.entries[0][1], unit.entries[1][1]
    row = replace(row_of(unit), content=device_code(kernel_source([kept]), "sm_80"))
    check = only_failure(lab.judge(lab.with_row(row)), f"missing entry: {lost}")
    assert "never instantiated for this dtype and these axes" in check.why


def test_another_units_binary_under_this_name(lab: Lab) -> None:
    row = replace(row_of(lab.unit("bf16", "sm_80")), content=row_of(lab.unit("f16", "sm_80")).content)
    names = {check.name.split(":")[0] for check in failures(lab.judge(lab.with_row(row)))}
    assert names == {"missing entry", "entry outside the table"}


def test_a_relinked_library_and_one_without_provenance(lab: Lab) -> None:
    library = lab.workshop.library(lab.rows)
    library.write_bytes(library.read_bytes() + b"\0")
    assert "not the one that was built" in only_failure(audit(library, tables=lab.tables), "provenance").why
    (library.parent / "provenance.json").unlink()
    assert "no readable provenance.json" in only_failure(audit(library, tables=lab.tables), "provenance").found


def test_nothing_that_could_be_launched_is_no_pass() -> None:
    (check,) = check_launches(())
    assert (check.verdict, check.why) == (Verdict.FAIL, "Nothing was proved.")


def test_f15_shared_memory_over_the_limit_of_one_gpu(lab: Lab) -> None:
    """120 KiB fit an A100 and an H100; an sm_80 binary also runs on sm_86 and sm_89, where they do not."""
    unit = lab.unit("f16", "sm_80")
    report = lab.judge(lab.with_row(replace(row_of(unit), smem_dynamic=122880)))
    check = named(report, f"not launchable: {unit.entries[0][1]} on sm86")
    assert "122880 bytes of shared memory per block, sm86 has 101376 after opting in" in check.found
    assert "flashmoe smem --arch sm86" in check.next_step
    blocked = {c.name.rsplit(" ", 1)[1] for c in failures(report) if c.name.startswith("not launchable")}
    assert blocked == {"sm86", "sm89"}
    assert named(report, f"shared memory: {unit.name}.sm_80").found == "122880 bytes in the index"


def test_host_code_in_place_of_a_cubin(lab: Lab, sound: Path) -> None:
    report = lab.judge(lab.first(content=sound.read_bytes()))
    assert "not device code" in named(report, "unreadable binary").found


def moved(payload: dict[str, Any]) -> dict[str, Any]:
    payload["binaries"][-1]["offset"] += 1 << 30
    return payload


def shifted(payload: dict[str, Any]) -> dict[str, Any]:
    payload["binaries"][-1]["offset"] += 1
    payload["binaries"][-1]["size"] -= 1
    return payload


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda payload: "{", "JSONDecodeError"),
        (lambda payload: {**payload, "schema": "flashmoe.index/9"}, "schema 'flashmoe.index/9'"),
        (lambda payload: {"schema": payload["schema"]}, "binaries is missing"),
        (lambda payload: {**payload, "binaries": []}, "the index of embedded binaries is empty"),
        (lambda payload: {**payload, "binaries": [{}]}, "offset is missing"),
        (lambda payload: "[" * 100_000, "RecursionError"),
        (lambda payload: [payload], "a table is needed"),
        (lambda payload: {**payload, "binaries": {"offset": 0}}, "list is needed"),
        (lambda payload: {**payload, "binaries": [{**payload["binaries"][0], "offset": 1e999}]}, "int is needed"),
        (lambda payload: {**payload, "binaries": [{**payload["binaries"][0], "entries": [[]]}]}, "str is needed"),
    ],
    ids=["json", "schema", "no list", "empty", "fields", "deep", "no object", "object", "infinite", "nested"],
)
def test_damaged_index(lab: Lab, change: Any, message: str) -> None:
    assert message in only_failure(lab.judge(lab.rows, index=change), "embedded binaries").found


@pytest.mark.parametrize(
    ("change", "message"), [(moved, "but the section holds 0 of them"), (shifted, "not on a 16-byte boundary")]
)
def test_index_that_points_elsewhere(lab: Lab, change: Any, message: str) -> None:
    assert message in named(lab.judge(lab.rows, index=change), "unreadable binary").found


@pytest.mark.parametrize("section", [".flashmoe.index", ".flashmoe.cubins"])
def test_section_is_missing(lab: Lab, section: str) -> None:
    report = lab.judge(lab.rows, embed=EMBED.replace(section, ".other"))
    assert f"has no section {section}" in only_failure(report, "embedded binaries").found


def test_local_memory_that_the_table_allows_is_no_warning(lab: Lab) -> None:
    """What we decided to accept is reported once, with its size, and does not change the verdict PASS."""
    rows = tuple(replace(row, allow={"spill": "one word"}) for row in lab.tables.kernels)
    tables = replace(lab.tables, kernels=rows)
    report = audit(lab.workshop.library(lab.compiled("f16", "sm_80", body=SPILLING)), tables=tables)
    assert [check.name for check in report.checks if check.name.startswith("local memory: ")] == []
    told = next(check for check in report.checks if check.name == "local memory that kernels.toml allows")
    assert told.verdict is Verdict.PASS
    assert "400 bytes per thread (sm_80)" in told.found
    assert report.verdict is lab.judge(lab.rows).verdict


def test_cpu_only_build_is_a_warning(lab: Lab) -> None:
    report = lab.judge([], targets=[])
    assert report.verdict is Verdict.WARN
    assert any("CPU-only" in c.found for c in report.checks)


def test_no_target_beside_binaries_is_no_cpu_only_build(lab: Lab) -> None:
    """The record decides nothing that the file itself shows."""
    report = lab.judge(lab.rows, targets=[])
    assert named(report, "provenance: targets").found.startswith("none stated")
    assert not [check for check in report.checks if "CPU-only" in check.found]
