"""Embedded kernels: a dtype or target that is missing, bf16 where there is none, tiles that do not fit, and damaged cubins and index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from audit_builders import (
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
from flashmoe_tools.report import Verdict
from flashmoe_tools.tables import Tables, Unit


def unit_of(tables: Tables, dtype: str, target: str) -> Unit:
    return next(u for u in tables.units() if u.dtype == dtype and u.target.name == target)


def swapped(rows: tuple[Row, ...], name: str, target: str, new: Row) -> list[Row]:
    return [new if (row.name, row.target) == (name, target) else row for row in rows]


def test_missing_architecture(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    kept = [row for row in rows if row.target != "sm_90a"]
    report = audit(workshop.library(kept, targets=["sm_80", "sm_90a", "compute_80"], stated=kept), tables=tables)
    check = only_failure(report, "missing architecture: sm_90a")
    assert "On sm90 the first call would fail" in check.why


def test_partial_build_that_says_so_is_a_warning(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    kept = [row for row in rows if row.target == "sm_90a"]
    report = audit(workshop.library(kept), tables=tables)
    assert report.verdict is Verdict.WARN
    assert "leaves out compute_80, sm_80" in next(c for c in report.checks if c.verdict is Verdict.WARN).found
    assert named(
        audit(workshop.library(kept), Options(targets=("sm_80", "sm_90a")), tables), "missing architecture: sm_80"
    )


def test_f5_missing_dtype(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    kept = [row for row in rows if (row.name, row.target) != ("attention_forward_sm80_bf16_d64", "sm_80")]
    check = only_failure(
        audit(workshop.library(kept), tables=tables), "missing kernel: attention_forward_sm80_bf16_d64 for sm_80"
    )
    assert "the unit for bf16 was not compiled or not embedded; f16 is there" in check.why
    assert "The table promises attention_forward_sm80_bf16_d64" in check.why


def test_f2_entry_never_instantiated(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    unit = unit_of(tables, "bf16", "sm_80")
    lost, kept = unit.entries[0][1], unit.entries[1][1]
    row = replace(row_of(unit), content=device_code(kernel_source([kept]), "sm_80"))
    check = only_failure(
        audit(workshop.library(swapped(rows, unit.name, "sm_80", row)), tables=tables), f"missing entry: {lost}"
    )
    assert "never instantiated for this dtype and these axes" in check.why


def test_another_units_binary_under_this_name(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    unit, other = unit_of(tables, "bf16", "sm_80"), unit_of(tables, "f16", "sm_80")
    row = replace(row_of(unit), content=row_of(other).content)
    report = audit(workshop.library(swapped(rows, unit.name, "sm_80", row)), tables=tables)
    names = {check.name.split(":")[0] for check in failures(report)}
    assert names == {"missing entry", "entry outside the table"}


def test_kernel_outside_the_table(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    name = "attention_forward_sm80_f16_d32"
    symbol = f"flashmoe_{name}_full"
    extra = Row(name, "sm_80", device_code(kernel_source([symbol]), "sm_80"), (symbol,), 0, 128)
    only_failure(audit(workshop.library([*rows, extra]), tables=tables), f"kernel outside the table: {name} for sm_80")


def test_f10_bf16_for_sm75(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    symbols = ("flashmoe_attention_forward_sm75_bf16_d64_full",)
    extra = Row(
        "attention_forward_sm75_bf16_d64", "sm_75", device_code(kernel_source(symbols), "sm_75"), symbols, 0, 128
    )
    report = audit(workshop.library([*rows, extra]), tables=tables)
    check = named(report, "bf16 for sm_75")
    assert check.found == symbols[0]
    assert "Compute capability 7.5 has no bf16 arithmetic" in check.why


def test_code_for_another_architecture(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    unit = unit_of(tables, "f16", "sm_80")
    row = replace(row_of(unit), content=device_code(kernel_source([s for _, s in unit.entries]), "sm_86"))
    check = only_failure(
        audit(workshop.library(swapped(rows, unit.name, "sm_80", row)), tables=tables),
        f"architecture: {unit.name}.sm_80",
    )
    assert (check.found, check.expected) == ("code for sm_86", "code for sm_80")


def test_code_without_the_architecture_specific_features(
    workshop: Workshop, rows: tuple[Row, ...], tables: Tables
) -> None:
    unit = unit_of(tables, "f16", "sm_90a")
    row = replace(row_of(unit), content=device_code(kernel_source([s for _, s in unit.entries]), "sm_90"))
    check = only_failure(
        audit(workshop.library(swapped(rows, unit.name, "sm_90a", row)), tables=tables),
        f"architecture: {unit.name}.sm_90a",
    )
    assert (check.found, check.expected) == ("code for sm_90", "code for sm_90a")


def edited(row: Row) -> Row:
    """One byte of machine code changed; the index still states the old sha256."""
    place = len(row.content) // 2
    content = row.content[:place] + bytes([row.content[place] ^ 1]) + row.content[place + 1 :]
    return replace(row, content=content, sha256=row.digest)


def test_edited_cubin(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    library = workshop.library([edited(rows[0]), *rows[1:]], stated=rows)
    report = audit(library, tables=tables)
    assert "changed after the build" in named(report, f"edited binary: {rows[0].name}.{rows[0].target}").why


def test_edited_cubin_with_its_index(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    row = replace(edited(rows[0]), sha256="")
    report = audit(workshop.library([row, *rows[1:]], stated=rows), tables=tables)
    assert "edited after the build, index included" in only_failure(report, f"provenance: {row.name}.{row.target}").why


def test_relinked_library(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    library = workshop.library(rows)
    library.write_bytes(library.read_bytes() + b"\0")
    assert "not the one that was built" in only_failure(audit(library, tables=tables), "provenance").why


def test_a_kernel_that_the_provenance_promises_is_gone(
    workshop: Workshop, rows: tuple[Row, ...], tables: Tables
) -> None:
    gone = rows[-1]
    report = audit(workshop.library(rows[:-1], stated=rows), tables=tables)
    assert named(report, f"provenance: {gone.name}.{gone.target}").found == "not embedded"


def test_a_kernel_that_the_provenance_does_not_know(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    added = rows[-1]
    every = list(dict.fromkeys(row.target for row in rows))
    report = audit(workshop.library(rows, stated=rows[:-1], targets=every), tables=tables)
    assert only_failure(report, f"provenance: {added.name}.{added.target}").found == "embedded"


def test_an_index_that_names_another_entry(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    row = replace(rows[0], entries=(*rows[0].entries[:-1], "flashmoe_something_else"))
    report = audit(workshop.library([row, *rows[1:]]), tables=tables)
    assert "flashmoe_something_else" in named(report, f"index entries: {row.name}.{row.target}").found


def test_a_binary_for_a_target_that_no_table_has(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    report = audit(workshop.library([*rows, replace(rows[0], target="sm_99")]), tables=tables)
    assert named(report, "targets: sm_99").why.startswith("No GPU in the table can load it")


def test_nothing_that_could_be_launched_is_no_pass() -> None:
    (check,) = check_launches(())
    assert (check.verdict, check.why) == (Verdict.FAIL, "Nothing was proved.")


def test_no_provenance(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    library = workshop.library(rows)
    (library.parent / "provenance.json").unlink()
    assert "no readable provenance.json" in only_failure(audit(library, tables=tables), "provenance").found


def test_f15_shared_memory_over_the_limit_of_one_gpu(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    """120 KiB fit an A100 and an H100; a sm_80 binary runs on sm_86 and sm_89 too, where they do not."""
    unit = unit_of(tables, "f16", "sm_80")
    report = audit(
        workshop.library(swapped(rows, unit.name, "sm_80", replace(row_of(unit), smem_dynamic=122880))), tables=tables
    )
    check = named(report, f"not launchable: {unit.entries[0][1]} on sm86")
    assert "122880 bytes of shared memory per block, sm86 has 101376 after opting in" in check.found
    assert "flashmoe smem --arch sm86" in check.next_step
    blocked = {c.name.rsplit(" ", 1)[1] for c in failures(report) if c.name.startswith("not launchable")}
    assert blocked == {"sm86", "sm89"}
    assert named(report, f"shared memory: {unit.name}.sm_80").found == "122880 bytes in the index"


def test_launch_bounds_below_the_block(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    unit = unit_of(tables, "f16", "sm_80")
    row = row_of(unit, threads=64)
    report = audit(workshop.library(swapped(rows, unit.name, "sm_80", row)), tables=tables)
    assert named(report, f"launch bounds: {unit.entries[0][1]}").found == "at most 64 threads (sm_80)"


def test_threads_other_than_the_tables(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    report = audit(workshop.library([replace(rows[0], threads=96), *rows[1:]]), tables=tables)
    only_failure(report, f"threads: {rows[0].name}.{rows[0].target}")


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "compute_80"])
def test_local_memory(workshop: Workshop, rows: tuple[Row, ...], tables: Tables, target: str) -> None:
    unit = unit_of(tables, "f16", target)
    body = "float many[100]; for (int i = 0; i < 100; ++i) many[i] = out[i]; out[0] = many[n];"
    report = audit(workshop.library(swapped(rows, unit.name, target, row_of(unit, body=body))), tables=tables)
    check = named(report, f"local memory: {unit.entries[0][1]}")
    assert check.found == f"400 bytes per thread for {target}"


def test_parameters_of_another_layout(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    unit = unit_of(tables, "f16", "sm_90a")
    row = row_of(unit, parameters="float* out, int n, long more, long still_more")
    check = only_failure(
        audit(workshop.library(swapped(rows, unit.name, "sm_90a", row)), tables=tables),
        "parameters: attention_forward_sm80",
    )
    assert "12 bytes in" in check.found
    assert "stale cache" in check.why


def test_parameters_over_the_limit(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    unit = unit_of(tables, "f16", "sm_90a")
    many = ", ".join(f"double4 d{index}" for index in range(MAX_PARAM_BYTES // 32 + 1))
    row = row_of(unit, parameters=f"float* out, int n, {many}")
    report = audit(workshop.library(swapped(rows, unit.name, "sm_90a", row)), tables=tables)
    assert any(check.expected == f"at most {MAX_PARAM_BYTES}" for check in failures(report)), failures(report)


def test_binary_that_is_no_cubin(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    row = replace(rows[0], content=b"not a cubin at all" * 8)
    check = named(
        audit(workshop.library([row, *rows[1:]]), tables=tables), f"unreadable binary: {row.name}.{row.target}"
    )
    assert "is not an ELF file" in check.found


def test_truncated_cubin(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    row = replace(rows[0], content=rows[0].content[: len(rows[0].content) // 2])
    check = named(audit(workshop.library([row, *rows[1:]]), tables=tables), "unreadable binary")
    assert "is cut short" in check.found


def test_host_code_in_place_of_a_cubin(workshop: Workshop, rows: tuple[Row, ...], sound: Path, tables: Tables) -> None:
    row = replace(rows[0], content=sound.read_bytes())
    assert (
        "not device code" in named(audit(workshop.library([row, *rows[1:]]), tables=tables), "unreadable binary").found
    )


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
def test_damaged_index(workshop: Workshop, rows: tuple[Row, ...], tables: Tables, change: Any, message: str) -> None:
    assert (
        message in only_failure(audit(workshop.library(rows, index=change), tables=tables), "embedded binaries").found
    )


@pytest.mark.parametrize(
    ("change", "message"), [(moved, "but the section holds 0 of them"), (shifted, "not on a 16-byte boundary")]
)
def test_index_that_points_elsewhere(
    workshop: Workshop, rows: tuple[Row, ...], tables: Tables, change: Any, message: str
) -> None:
    assert message in named(audit(workshop.library(rows, index=change), tables=tables), "unreadable binary").found


@pytest.mark.parametrize("section", [".flashmoe.index", ".flashmoe.cubins"])
def test_section_is_missing(workshop: Workshop, rows: tuple[Row, ...], tables: Tables, section: str) -> None:
    from audit_builders import EMBED

    path = workshop.library(rows, embed=EMBED.replace(section, ".other"))
    assert f"has no section {section}" in only_failure(audit(path, tables=tables), "embedded binaries").found


def test_kernel_twice(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    report = audit(workshop.library([*rows, rows[0]], stated=rows), tables=tables)
    assert named(report, f"kernel twice: {rows[0].name}")


def test_cpu_only_build_is_a_warning(workshop: Workshop, tables: Tables) -> None:
    report = audit(workshop.library([], targets=[]), tables=tables)
    assert report.verdict is Verdict.WARN
    assert any("CPU-only" in c.found for c in report.checks)
