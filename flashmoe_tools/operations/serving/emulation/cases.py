"""The problems for one kernel of ragged and paged attention: every branch, at the smallest sizes its tile allows."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flashmoe_tools.operations.serving.emulation.problem import (
    UNBOUNDED,
    Keys,
    MaskTensor,
    Rows,
    VarlenProblem,
    adds_alibi,
)
from flashmoe_tools.operations.serving.emulation.tensors import MASK_BLOCK
from flashmoe_tools.tables import Unit

# The f16 kernel with the smallest head dim runs every problem; the others, which are the same source with other sizes
# or conversions, run some.
REDUCED = (
    "ragged",
    "divided",
    "exact",
    "paged",
    "window",
    "softcap",
    "soft softcap",
    "wide softcap",
    "shared tiles",
    "lowest mask",
    "hidden blocks",
)
MINIMAL = ("ragged",)
SMALL_PAGE = {"sm90": 8, "sm80": 3, "sm75": 3}  # the smallest of a family, or one that no power of two divides
MAX_SPLITS = 5
SMALLEST = 64  # head dim


def problems(unit: Unit) -> Iterator[VarlenProblem]:
    """The problems by what they need: lengths, pages, windows, scores, then decoding.

    If score functions have their own kernel, the problems are divided between the two.
    """
    if unit.row.operation == DROPOUT:
        has_alibi = adds_alibi(unit.row.options)
        for problem in with_dropout(unit, _with_alibi(_prefill(unit)) if has_alibi else _prefill(unit)):
            if has_alibi or unit.row.family != "sm90" or not problem.has_score_functions:
                yield problem
        return
    if unit.row.operation == MASK:
        yield from streamed_masks(unit, REDUCED)
        yield from _narrowed(unit)
        return
    if adds_alibi(unit.row.options):
        yield from _with_alibi(_prefill(unit))
        return
    is_split = bool(unit.row.options.get("split"))
    functions = unit.row.options.get("scores")
    whole = (*_prefill(unit), *_decoding(unit), _falling(unit))
    for seed, problem in enumerate(_decoding(unit) if is_split else whole):
        if functions is not None and problem.has_score_functions != bool(functions):
            continue
        is_wide = unit.row.axes["head_dim"] > 64
        is_short = unit.row.variant == "m64"
        if unit.dtype == "bf16" or is_wide or is_short:
            names = MINIMAL if unit.dtype == "bf16" and (is_wide or is_short) and not functions else REDUCED
            if unit.row.family == "sm80" and unit.row.options.get("masked_loop"):
                names = (*names, "wide window")  # complete tiles between others
            if unit.row.options.get("column_warps", 1) > 1:
                names = (*names, "full")  # fewer value columns than the first warp has
            if problem.name not in names and not is_split:
                continue
        yield replace(problem, data_seed=seed)


MASK = "attention_mask_forward"


def streamed_masks(unit: Unit, few: tuple[str, ...]) -> Iterator[VarlenProblem]:
    """Dense problems with a mask per sequence and head, per head, per sequence, and one for all.

    ``few``: names of those that a bf16 kernel runs.
    """
    m, n, dim = unit.row.block_m, unit.row.block_n, unit.row.axes["head_dim"]

    def base(name: str, rows: tuple[int, ...], keys: tuple[int, ...]) -> VarlenProblem:
        sizes = (rows, keys, 2, 2, dim, dim, Rows.DENSE, Keys.DENSE)
        return VarlenProblem(name, unit.dtype, *sizes, mask=MaskTensor.ADDITIVE, has_counter=True)

    short = base("full", (2 * m + 7,) * 2, (n + 70,) * 2)
    window = base("window", (4 * m,) * 2, (4 * m + 5,) * 2)
    blocks = replace(base("hidden blocks", (max(261, m + 70),) * 2, (7 * 64 + 9,) * 2), hides_blocks=True)
    found = [
        replace(base("ragged", (m + 3,) * 2, (2 * n + 9,) * 2), right=0),
        replace(short, head_dim=dim // 2 + 8, head_dim_v=dim // 2 - 8, mask_broadcast=(True, False, False)),
        replace(
            window, left=70, right=3, has_sinks=True, heads_kv=1, mask_broadcast=(False, True, False), has_lowest=True
        ),
        replace(base("dense", (m + 3,) * 3, (n, n + 1, 0)), heads_q=4, mask_broadcast=(True, True, False)),
        replace(blocks, mask_broadcast=(True, False, False)),
        replace(blocks, name="hidden blocks, groups", heads_q=4, mask_broadcast=(False, True, False)),
    ]
    for seed, problem in enumerate(found):
        if unit.dtype == "f16" or problem.name in few:
            yield replace(problem, data_seed=seed)


def _narrowed(unit: Unit) -> Iterator[VarlenProblem]:
    """Masks that show few blocks, where a tile's range of them is cut: by the mask alone, by a window, or by both."""
    if unit.dtype != "f16":
        return
    m, dim = unit.row.block_m, unit.row.axes["head_dim"]
    rows, keys = m + 70, 11 * MASK_BLOCK + 9

    def of_tiles(*blocks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(blocks[row // m] for row in range(0, rows, MASK_BLOCK))

    def base(name: str, *visible: tuple[tuple[int, ...], ...]) -> VarlenProblem:
        sizes = ((rows,) * 2, (keys,) * 2, 2, 2, dim, dim, Rows.DENSE, Keys.DENSE)
        options: dict[str, Any] = {"mask": MaskTensor.ADDITIVE, "hides_blocks": True, "visible_blocks": visible}
        return VarlenProblem(name, unit.dtype, *sizes, **options)

    # Each place in a word is the first and the last block of some tile.
    yield base("one block", *(of_tiles((4 + place,), (4 + (place + 1) % 4,)) for place in range(4)))
    # The window begins at block 4 or 5 and ends after block 10 for the first tile, and has blocks 8 to 11 for the second.
    window = (of_tiles((8, 11), (9,)), of_tiles((7, 9), (2,)), of_tiles((3, 7), (9, 10)), of_tiles((11,), ()))
    yield replace(base("blocks in a window", *window), left=100, right=0, has_sinks=True)
    # A lane reads the words of both blocks.
    yield replace(base("far blocks", ((3, 128),)), rows=(9,), keys=(128 * MASK_BLOCK + 9,), heads_q=1, heads_kv=1)


DROPOUT = "attention_dropout_forward"
DROPPED = ("ragged", "full", "window", "soft softcap", "mask", "additive mask", "dense")
PROBABILITIES = (0.1, 0.5, 0.83)


def with_dropout(unit: Unit, problems: Iterator[VarlenProblem]) -> Iterator[VarlenProblem]:
    """The problems that exercise all inputs of a dropout mask: rows, keys, heads and sequences, and each kind of scores."""
    is_split_of_hopper = unit.row.family == "sm90" and unit.row.operation.endswith(("_dq", "_dkv"))  # only one head dim
    is_whole = unit.dtype == "f16" and (is_split_of_hopper or unit.row.axes["head_dim"] == SMALLEST)
    names = DROPPED if is_whole else DROPPED[:3]
    for seed, problem in enumerate(problem for problem in problems if problem.name in names):
        yield replace(problem, data_seed=seed, dropout_p=PROBABILITIES[seed % len(PROBABILITIES)])


ALIBI = ("ragged", "full", "paged", "window", "soft softcap", "dense", "many")


def _with_alibi(problems: Iterator[VarlenProblem]) -> Iterator[VarlenProblem]:
    """The problems that exercise ALiBi's inputs: its rows' keys, tails, heads, sequences; slopes shared or per sequence."""
    for seed, problem in enumerate(problems):
        if problem.name in ALIBI:
            yield replace(problem, mask=MaskTensor.ALIBI, mask_broadcast=(seed % 2 == 1, False, False), data_seed=seed)


def value_parts(unit: Unit) -> int:
    """Number of tiles that share the output's columns."""
    return unit.row.axes["head_dim"] // 256 if unit.row.family == "sm90" and unit.row.axes["head_dim"] > 256 else 1


def value_dim(unit: Unit) -> int:
    return (unit.row.axes["head_dim"] - unit.row.options.get("narrower", 0)) * value_parts(unit)


def _base(unit: Unit, name: str, rows: tuple[int, ...], keys: tuple[int, ...]) -> VarlenProblem:
    dim = unit.row.axes["head_dim"]
    return VarlenProblem(name, unit.dtype, rows, keys, 2, 1, dim, value_dim(unit))


def diagonals(base: VarlenProblem, unit: Unit, edge: int) -> Iterator[VarlenProblem]:
    """Causal, with keys - rows from -3 to 3, one sequence for each, with and without a softcap.

    Lengths are drawn around the edges of blocks of ``edge``.
    """
    draw = random.Random(unit.name)
    keys = [max(4, edge * draw.choice((1, 1, 2)) + draw.randint(-2, 4)) for _ in range(7)]
    rows = tuple(length - over for length, over in zip(keys, range(-3, 4), strict=True))
    plain = replace(base, rows=rows, keys=tuple(keys), right=0, heads_q=1)
    yield plain
    yield replace(plain, name=f"{base.name}, softcap", softcap=50.0)


def _prefill(unit: Unit) -> Iterator[VarlenProblem]:
    m, n, dim = unit.row.block_m, unit.row.block_n, unit.row.axes["head_dim"]
    page = SMALL_PAGE[unit.row.family]
    narrow = dim // 2 + 8
    # Sequences without rows, without keys, with fewer keys than rows (rows that see none), one past a tile both ways.
    yield replace(_base(unit, "ragged", (m + 1, 0, 5, 9, 3), (2 * n + 1, n, 0, 4, 7)), right=0)
    # Part of a batch whose short sequences are processed by a decoding kernel.
    yield replace(_base(unit, "divided", (m + 1, 5, 0, 17, 16, 1), (n + 9, n, 5, 20, 16, 3)), right=0, max_decode=16)
    # No mask; fewer columns than the kernel's, another number for values; bounds that exceed the sequences.
    full = _base(unit, "full", (7, m, 0), (n + 3, 2 * n, 0))
    yield replace(full, heads_q=3, heads_kv=3, head_dim=narrow, head_dim_v=dim // 2 - 8, slack=70, wants_lse=False)
    # Pages in random order, one of them shared; keys in a page past the end of a sequence belong to none.
    paged = _base(unit, "paged", (m + 2, 3, 1), (2 * n + 5, n - 1, 17))
    yield replace(paged, keys_layout=Keys.PAGED, page_size=16, right=0, slack=9)
    # A window that has left pages behind; they are in one tile with visible ones.
    small = replace(paged, name="small pages", rows=(3, 0, 2), keys=(n + 5, 4, page + 1), left=6, right=0)
    yield replace(small, keys_layout=Keys.PAGED, page_size=page)
    # A page size that neither divides a tile nor is a multiple of one; the last sequence fills its row of the block
    # table.
    yield replace(
        paged, name="odd pages", keys_layout=Keys.PAGED, page_size=80, rows=(5, 2), keys=(81, 2 * n + 3), slack=0
    )
    # The window's left end inside a tile, its right end before and after the diagonal; a sink.
    window = _base(unit, "window", (2 * m + 9, 4), (2 * m + 3 * n, n + 9))
    yield replace(window, left=n // 2 + 3, right=5, has_sinks=True)
    yield replace(window, name="narrow window", left=1, right=0, rows=(m + 70, 3), keys=(n, 9), has_sinks=True)
    # A window wider than a tile: if its left end is inside a tile, its right end is past it.
    yield replace(window, name="wide window", left=2 * n + 5, right=0, rows=(m + 9, 3), keys=(m + 4 * n, 7))
    # More rows than keys, with a sink: rows without a key only have the sink.
    yield replace(_base(unit, "sinks", (m + 7, 2), (5, 0)), right=0, has_sinks=True, heads_q=4, heads_kv=2)
    # Bit for bit: rows of a tile that see blocks that their neighbours do not, at both ends; sinks; keys in pages.
    exact = _base(unit, "exact", (m + 9, 5), (m + 4 * n + 21, 2 * n + 3))
    yield replace(exact, right=0, has_sinks=True, is_exact=True)
    yield replace(
        exact, name="exact window", left=n + n // 2 + 3, right=0, is_exact=True, keys_layout=Keys.PAGED, page_size=16
    )
    # Scores on both sides of the bend of tanh.
    softcap = replace(_base(unit, "softcap", (37, 2), (2 * n + 3, 9)), softcap=7.0, magnitude=6.0)
    yield replace(softcap, mask=MaskTensor.ADDITIVE, mask_broadcast=(True, False, True))
    soft = replace(softcap, name="soft softcap", softcap=30.0, magnitude=1.3, keys=(4 * n + 3, 9), has_sinks=True)
    yield replace(soft, left=3 * n, right=0)  # the third block from the end needs no mask
    mild = replace(soft, name="mild softcap", magnitude=6.0, rows=(9, 2), keys=(n + 3, 9))
    yield mild
    yield replace(mild, name="sharp softcap", softcap=25.0, magnitude=400.0)
    yield replace(mild, name="wide softcap", softcap=200.0)  # no score is near its limit
    masked = _base(unit, "mask", (33, 33), (n + 9, n + 9))
    masked = replace(masked, rows_layout=Rows.DENSE, keys_layout=Keys.DENSE)
    yield replace(masked, mask=MaskTensor.BOOL, mask_broadcast=(False, True, False))
    even = replace(masked, keys=(n + 10, n + 10))  # one load reads two values of a row
    yield replace(even, name="additive mask", mask=MaskTensor.ADDITIVE, right=0, heads_q=4, heads_kv=2)
    # A head dim whose scale has rounding errors of the other sign.
    lowest = replace(even, name="lowest mask", keys=(2 * n + 10,) * 2, mask=MaskTensor.ADDITIVE, has_lowest=True)
    yield replace(lowest, heads_q=1, mask_broadcast=(False, False, False), wants_lse=False, head_dim=narrow)
    yield from diagonals(_base(unit, "diagonals", (), ()), unit, n)
    # Dense rows and keys with unused room at the end; more tiles than blocks, and no counter.
    dense = _base(unit, "dense", (m + 3,) * 3, (n, 2 * n + 1, 0))
    yield replace(dense, rows_layout=Rows.DENSE, keys_layout=Keys.DENSE, spare_keys=n // 2 + 1, has_counter=False)
    # More sequences than a warp has lanes.
    rows = tuple(index % 3 for index in range(70))
    yield replace(_base(unit, "many", (*rows, m + 5), (*rows, 9)), right=0, heads_q=1)
    if unit.row.family != "sm90":
        return
    # Enough short sequences that query heads with the same keys share a tile (SharedTiles there); the last tile of a
    # group has fewer heads.
    short = _base(unit, "shared tiles", (9, m // 2, 0, 64, 1), (n + 5, 2 * n + 1, 4, 0, n))
    short = replace(short, right=0, heads_q=10, has_sinks=True)
    yield short
    # With a mask tensor tiles are not shared.
    yield replace(short, name="unshared tiles", mask=MaskTensor.ADDITIVE, mask_broadcast=(False, False, False))


def _falling(unit: Unit) -> VarlenProblem:
    """Rows with a few keys in each of two blocks, and scores of one sign only.

    One row's maximum is far below that of the previous block, while another row's is far above.
    """
    n = unit.row.block_n
    problem = replace(_base(unit, "falling scores", (24, 20), (n + 16, n + 16)), heads_q=6, heads_kv=6)
    return replace(problem, softcap=60.0, magnitude=400.0, left=4, right=0)


MIN_SPLIT = 256  # keys, kLeastShare
SCORES: tuple[dict[str, Any], ...] = (
    {"softcap": 7.0, "magnitude": 3.0},
    {"mask": MaskTensor.ADDITIVE, "mask_broadcast": (False, False, False)},
    {"mask": MaskTensor.BOOL, "mask_broadcast": (False, True, False)},
    {"softcap": 30.0},
    {"softcap": 9.0, "mask": MaskTensor.ADDITIVE, "mask_broadcast": (True, False, False)},
)


def chunks(unit: Unit) -> Iterator[VarlenProblem]:
    """The heads of a group as rows of a tile, for groups of all kinds, with and without splits of the keys.

    Some tiles have fewer splits than others.
    """
    for seed, problem in enumerate(_chunks(unit)):
        if not unit.row.options.get("scores"):
            yield replace(problem, data_seed=seed)
        elif not problem.is_exact:
            yield replace(problem, data_seed=seed, **SCORES[seed % len(SCORES)])


def _chunks(unit: Unit) -> Iterator[VarlenProblem]:
    n, dim = unit.row.block_n, unit.row.axes["head_dim"]
    positions = unit.row.block_m // 4  # query positions per tile, for groups of three or four heads
    # Past the middle of a tile; no rows, no keys, rows that see none.
    ragged = _base(unit, "ragged", (positions + positions // 2 + 3, 0, 5, 9, 3), (2 * n + 1, n, 0, 4, 7))
    ragged = replace(ragged, heads_q=4, right=0)
    yield ragged
    # Of three splits a sequence has own keys in all, one or none, and some rows see none of the last split.
    shares = replace(ragged, name="shares", heads_q=8, heads_kv=2, has_sinks=True, splits=3)
    yield replace(shares, rows=(positions + 3, 3, 0, 2), keys=(3 * MIN_SPLIT + n + 9, 2 * MIN_SPLIT - 5, 5, 1))
    # Group sizes that are no power of two; pages.
    paged = replace(ragged, name="group of seven", heads_q=7, keys_layout=Keys.PAGED, page_size=16, slack=9)
    yield replace(paged, rows=(positions // 2 + 1, 3), keys=(2 * MIN_SPLIT + 5, 17), has_sinks=True, splits=2)
    yield replace(paged, name="group of forty", heads_q=40, rows=(3, 1), keys=(n + 5, 9), page_size=8, right=UNBOUNDED)
    # The window's left end inside a tile; the splits divide what the tile sees.
    window = replace(shares, name="window", heads_q=6, left=2 * MIN_SPLIT, right=3)
    yield replace(window, rows=(positions + 5, 4), keys=(3 * MIN_SPLIT, n + 9))
    # Bit for bit, unsplit: rows of a tile that see blocks that their neighbours do not.
    yield replace(
        ragged, name="exact", rows=(positions, 5), keys=(positions + 2 * n + 21, n + 3), has_sinks=True, is_exact=True
    )
    # No group; fewer columns than the kernel's, another number for values; bounds that exceed the sequences.
    full = _base(unit, "full", (7, unit.row.block_m, 0), (2 * MIN_SPLIT + 3, 2 * n, 0))
    full = replace(full, heads_q=2, heads_kv=2, head_dim=dim // 2 + 8, head_dim_v=dim // 2 - 8, slack=70, splits=2)
    yield replace(full, wants_lse=False)
    # Dense rows and keys with unused room at the end; more tiles than blocks, and no counter.
    dense = _base(unit, "dense", (positions + 3,) * 3, (n, 2 * MIN_SPLIT + 1, 0))
    dense = replace(dense, heads_q=4, rows_layout=Rows.DENSE, keys_layout=Keys.DENSE, spare_keys=n // 2 + 1)
    yield replace(dense, has_counter=False, right=0)
    yield replace(dense, name="dense, shares", splits=2, has_counter=False)
    # More sequences than a warp has lanes.
    rows = tuple(index % 3 for index in range(40))
    many = _base(unit, "many", (*rows, positions + 5), (*rows, 2 * MIN_SPLIT))
    yield replace(many, heads_q=4, right=0, splits=2)


def _decoding(unit: Unit) -> Iterator[VarlenProblem]:
    n = unit.row.block_n
    splits = MAX_SPLITS if unit.row.options.get("split") else 1
    # One query position per sequence, with the heads of a group as rows; one long sequence and several short ones.
    decode = replace(
        _base(unit, "decode", (1,) * 5, (3 * n + 7, 3, 0, n, 2 * n + 1)), heads_q=8, heads_kv=2, is_folded=True
    )
    decode = replace(decode, rows_layout=Rows.DENSE, keys_layout=Keys.PAGED, page_size=16, splits=splits)
    yield decode
    yield replace(decode, name="decode, sinks", has_sinks=True, softcap=20.0, magnitude=4.0, left=n + 5, right=0)
    mask = replace(decode, name="decode, mask", mask=MaskTensor.ADDITIVE, keys_layout=Keys.DENSE, spare_keys=9)
    yield replace(mask, keys=(2 * n + 7, 3, 5, n, n + 1))
    # Few rows per sequence, causal, ragged: a split may hold no key that a row sees.
    few = replace(_base(unit, "few rows", (3, 1, 0, 2), (4 * n + 1, n + 2, 5, 1)), right=0, has_sinks=True)
    yield replace(few, keys_layout=Keys.RAGGED, spare_keys=3, splits=splits)
