"""Writes the tables of README.md and docs/ from csrc/, flashmoe/attn/sdpa_dispatch.py and the reports in docs/results.

    python -m flashmoe_build.docs            # write
    python -m flashmoe_build.docs --check    # fail if a table is not what its source says

A generated part is enclosed by ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``; the rest of a file is not touched.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from flashmoe.attn import sdpa_dispatch
from flashmoe.errors import FlashmoeError, TableError
from flashmoe.variables import VARIABLES, Variable
from flashmoe_build import model_sweep, several_gpus, speed, varlen
from flashmoe_build.engines import record
from flashmoe_tools.descriptors import KernelRow
from flashmoe_tools.tables import Gpu, Tables, load_tables

ROOT = Path(__file__).resolve().parent.parent
OPERATION = "attention_forward"
ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx", "neon")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def gpu_table(tables: Tables) -> str:
    """Per GPU: which kernel family runs, from which machine code, for which dtypes and head dims."""
    header = ("GPU", "compute capability", "kernels (best first)", "machine code", "fp16 head dims", "bf16 head dims")
    return markdown(header, [gpu_row(tables, gpu) for gpu in tables.gpus])


def gpu_row(tables: Tables, gpu: Gpu) -> tuple[str, ...]:
    units = [unit for unit in tables.units() if unit.row.operation == OPERATION and gpu.name in unit.target.gpus]
    families = [name for name in gpu.families if any(unit.row.family == name for unit in units)]
    binaries = {unit.target for unit in units if not unit.target.is_ptx}
    own = sorted(binaries, key=lambda target: target.capability, reverse=True)
    dims = {
        dtype: sorted(
            {unit.row.axes["head_dim"] for unit in units if unit.dtype == dtype and unit.row.family in families}
        )
        for dtype in ("f16", "bf16")
    }
    return (
        gpu.products,
        ".".join(map(str, gpu.compute_capability)),
        ", ".join(families) or "none",
        ", ".join(target.name for target in own) or ("PTX only" if units else "none"),
        ", ".join(map(str, dims["f16"])) or "none",
        ", ".join(map(str, dims["bf16"])) or ("not on this GPU" if not gpu.bf16 else "none"),
    )


def row_table(tables: Tables, operation: str) -> str:
    """Per row of kernels.toml: the tile, what it costs, what it is compiled for."""
    rows = [row for row in tables.kernels if row.operation == operation]
    header = (
        "family",
        *(axis.name.replace("_", " ") for axis in rows[0].descriptor.axes),
        "dtypes",
        "tile",
        "stages",
        "warps",
        "blocks/SM asked",
        "schedule",
        "shared bytes",
        "targets",
    )
    return markdown(header, [row_cells(row) for row in rows])


def row_cells(row: KernelRow) -> tuple[str, ...]:
    return (
        f"{row.family} {row.variant}".strip(),
        *(
            str(row.axes[axis.name]) if axis.is_number else ", ".join(row.words[axis.name])
            for axis in row.descriptor.axes
        ),
        ", ".join(row.dtypes),
        tile_text(row),
        str(row.stages),
        str(row.warps),
        str(row.min_blocks),
        row.schedule,
        " or ".join(sorted({f"{row.smem_bytes(dtype):,}" for dtype in row.dtypes})),
        " ".join(row.targets),
    )


def tile_text(row: KernelRow) -> str:
    return f"{row.block_m}x{row.block_n}" if "block_n" in row.descriptor.tile else str(row.block_m)


def reasons(tables: Tables) -> str:
    """Why each tile was chosen, and what the resource check allows there."""
    lines = []
    for row in tables.kernels:
        numbers = (f"{axis.prefix}{row.axes[axis.name]}" for axis in row.descriptor.numbers)
        title = " ".join(filter(None, (row.operation, row.family, row.variant, "/".join(row.dtypes), *numbers)))
        partial = [
            row.words[axis.name] for axis in row.descriptor.word_axes if set(row.words[axis.name]) < set(axis.words)
        ]
        words = f" ({', '.join(word for words in partial for word in words)})" if partial else ""
        lines.append(f"- **{title}{words}, {tile_text(row)}**: {' '.join(row.why.split())}")
        lines += [f"  - allowed, {kind}: {' '.join(reason.split())}" for kind, reason in sorted(row.allow.items())]
    return "\n".join(lines)


KERNEL_PAGE = """# Every kernel that is built

Each row of each `csrc/*/kernels.toml` is one row here. The C++ dispatch, the translation units, the audit's expectations and
`flashmoe smem` are generated from the same files, so they cannot disagree. "Shared bytes" is the dynamic shared memory of one thread block,
which each unit asserts. A head dim between those listed runs in the next larger kernel, with the columns beyond it predicated."""


def kernel_page(tables: Tables) -> str:
    """A page of the site that is not in the tree: with the sources at hand, kernels.toml says the same."""
    operations = list(dict.fromkeys(row.operation for row in tables.kernels))
    parts = [f"## {operation}\n\n{row_table(tables, operation)}" for operation in operations]
    return "\n\n".join([KERNEL_PAGE, *parts, "## Why these tiles", reasons(tables)]) + "\n"


def target_table(tables: Tables) -> str:
    header = ("target", "kind", "runs on")
    rows = [(t.name, "PTX" if t.is_ptx else "machine code", ", ".join(t.gpus)) for t in tables.targets]
    return markdown(header, rows)


def sdpa_table(_: Tables) -> str:
    """What ``flashmoe.scaled_dot_product_attention`` runs in which case, from the rules that decide it."""
    rows = [
        *sdpa_dispatch.SUPPORTED,
        *((option, "torch") for _, rows in sdpa_dispatch.OBSTACLES for option in rows),
        (
            "key and value of different lengths",
            "nothing: ShapeError (torch's CPU kernel has no check and reads past the end)",
        ),
        ("other arguments that torch refuses", "torch, which raises its own error"),
    ]
    return markdown(("asked for", "runs on"), rows)


def variable_table(when: Collection[str], tables: Tables) -> str:
    """The environment variables of these programs, from the table that doctor also shows."""
    rows = [
        (f"`{one.name}`", ", ".join(f"`{value}`" for value in values_of(one)), one.meaning)
        for one in VARIABLES.values()
        if one.when in when
    ]
    return markdown(("variable", "values", "meaning"), rows)


def values_of(variable: Variable) -> tuple[str, ...]:
    """The variable's values; for instruction sets those of all machines, so that the table does not depend on where it is written."""
    return ISAS if variable.name == "FLASHMOE_CPU_ISA" else variable.values


def engine_table(_: Tables) -> str:
    """The engine versions in which the plug-ins' contract holds, from the record of ./nox -s engines."""
    return markdown(*record.table())


# (file, generated part, its writer)
PARTS: tuple[tuple[str, str, Callable[[Tables], str]], ...] = (
    ("docs/install.md", "gpus", gpu_table),
    ("docs/install.md", "targets", target_table),
    ("docs/api.md", "sdpa", sdpa_table),
    ("docs/api.md", "variables", partial(variable_table, ("run",))),
    ("docs/integrations.md", "engines", engine_table),
    ("docs/build.md", "variables", partial(variable_table, ("build", "test"))),
)
# The parts made from reports in docs/results, which an sdist does not contain; the writer returns header and rows, given the root.
REPORTED: tuple[tuple[str, str, Callable[[Path], tuple[Sequence[str], list[Sequence[str]]]]], ...] = (
    ("README.md", "headline", speed.headline_rows),
    ("docs/guides/models.md", "models", model_sweep.table),
    ("docs/performance.md", "speed", speed.attention_rows),
    ("docs/performance.md", "cache speed", speed.cache_rows),
    ("docs/performance.md", "expert speed", speed.expert_rows),
    ("docs/distributed.md", "divided attention", several_gpus.attention_table),
    ("docs/distributed.md", "divided experts", several_gpus.experts_table),
    ("docs/distributed.md", "experts by codes", several_gpus.codes_table),
    ("docs/distributed.md", "divided attention, four GPUs", partial(several_gpus.attention_table, size=4)),
    ("docs/distributed.md", "divided experts, four GPUs", partial(several_gpus.experts_table, size=4)),
    ("docs/kernels/attention-sm90.md", "forward by case", speed.prefill_rows),
    ("docs/kernels/mla.md", "prefill and training", speed.narrow_rows),
    ("docs/kernels/attention-fp8.md", "prefill in 8 bits", speed.fp8_rows),
    ("docs/kernels/moe.md", "experts in mxfp4", speed.mxfp4_rows),
    ("docs/kernels/attention-varlen.md", "ragged prefill", varlen.ragged_table),
    ("docs/kernels/attention-varlen.md", "ragged head dims", varlen.head_dim_table),
    ("docs/kernels/attention-varlen.md", "prefill from pages", varlen.pages_table),
    ("docs/kernels/attention-varlen.md", "scores", varlen.scores_table),
    ("docs/kernels/attention-varlen.md", "ragged backward", varlen.backward_table),
    ("docs/kernels/attention-varlen.md", "scores backward", varlen.backward_scores_table),
    ("docs/kernels/attention-bias-gradient.md", "learned masks", varlen.learned_table),
    ("docs/kernels/attention-decode.md", "decoding in graphs", varlen.decode_table),
    ("docs/kernels/attention-decode.md", "decoding by copy bandwidth", varlen.copy_table),
    ("docs/kernels/attention-decode.md", "decoding beside others", varlen.means_table),
    ("docs/kernels/attention-decode.md", "decoding shared pages", varlen.shared_table),
)

FIGURE = "docs/forward.svg"


def reported(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, or a sentence if the newest report is older than the cases that the table would show."""
    return markdown(header, rows) if rows else "The newest report does not have these cases yet."


def replace_part(text: str, name: str, body: str, origin: str) -> str:
    """``text`` with the generated part ``name`` set to ``body``; raises TableError when a marker is missing."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        msg = f"{origin}: needs one line {begin!r} and after it one line {end!r}; restore them"
        raise TableError(msg)
    head, rest = text.split(begin)
    return f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}"


def generate(root: Path, tables: Tables) -> Mapping[Path, str]:
    """The text that every file with a generated part should have."""
    bodies = [(name, part, write(tables)) for name, part, write in PARTS]
    if (ROOT / "docs" / "results").is_dir():
        bodies += [(name, part, reported(*rows(ROOT))) for name, part, rows in REPORTED]
    texts: dict[Path, str] = {}
    for name, part, body in bodies:
        path = root / name
        text = texts.get(path) or path.read_text(encoding="utf-8")
        texts[path] = replace_part(text, part, body, name)
    if (ROOT / "docs" / "results").is_dir():
        texts[root / FIGURE] = speed.prefill_figure(ROOT)
    return texts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="nox -s docs --", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    options = parser.parse_args(arguments)
    try:
        texts = generate(ROOT, load_tables(ROOT / "csrc"))
    except (FlashmoeError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'stale; run `nox -s docs`' if options.check else 'written'}")
        if not options.check:
            path.write_text(texts[path], encoding="utf-8")
    if not stale:
        print(f"{len(PARTS) + len(REPORTED)} generated parts are what their sources say")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
