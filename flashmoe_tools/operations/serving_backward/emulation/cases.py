"""The problems for one backward kernel of ragged attention: every branch, at the smallest sizes its tile allows."""

from collections.abc import Iterator
from dataclasses import replace

from flashmoe_tools.operations.serving.emulation.cases import (
    SMALLEST,
    diagonals,
    streamed_masks,
    value_dim,
    with_dropout,
)
from flashmoe_tools.operations.serving.emulation.problem import Keys, MaskTensor, Rows, VarlenProblem, adds_alibi
from flashmoe_tools.tables import Unit

FUSED = "attention_varlen_backward_fused"
DROPOUT_FUSED = "attention_dropout_backward_fused"
MASK_FUSED = "attention_mask_backward_fused"
ALIBI = ("ragged", "full", "window", "wide window", "soft softcap", "dense", "many")
REDUCED = ("ragged", "window", "soft softcap")  # of a bf16 kernel: the float16 kernel with other conversions


def problems(unit: Unit) -> Iterator[VarlenProblem]:
    """The problems by what they need: lengths, windows, scores."""
    if unit.row.operation.startswith("attention_dropout"):
        yield from _dropped(unit)
        return
    if unit.row.operation == MASK_FUSED:
        yield from streamed_masks(unit, REDUCED)
        return
    for seed, problem in enumerate(_problems(unit)):
        if _is_for(unit, problem) and (unit.dtype == "f16" or problem.name in REDUCED):
            if adds_alibi(unit.row.options):
                problem = replace(problem, mask=MaskTensor.ALIBI, mask_broadcast=(seed % 2 == 1, False, False))
            yield replace(problem, data_seed=seed, has_counter=problem.has_counter or unit.row.operation == FUSED)


def _dropped(unit: Unit) -> Iterator[VarlenProblem]:
    has_alibi, is_wgmma = adds_alibi(unit.row.options), unit.row.family == "sm90"
    for seed, problem in enumerate(with_dropout(unit, _problems(unit))):
        if is_wgmma:
            if not problem.has_score_functions:
                yield replace(problem, has_counter=problem.has_counter or unit.row.operation == DROPOUT_FUSED)
        elif not has_alibi:
            yield problem
        elif not problem.has_mask_tensor:
            yield replace(problem, mask=MaskTensor.ALIBI, mask_broadcast=(seed % 2 == 1, False, False))


def _is_for(unit: Unit, problem: VarlenProblem) -> bool:
    """Whether the kernel runs the problem.

    In families with separate kernels for score functions, those get such problems and the others the rest.
    """
    if adds_alibi(unit.row.options):
        is_served = unit.row.operation != FUSED or problem.softcap == 0
        return is_served and not problem.has_mask_tensor and problem.name in ALIBI
    functions = 0 if unit.row.operation == FUSED else unit.row.options.get("scores")
    return functions is None or problem.has_score_functions == bool(functions)


def _problems(unit: Unit) -> Iterator[VarlenProblem]:
    m, n, dim = unit.row.block_m, unit.row.block_n, unit.row.axes["head_dim"]

    def base(name: str, rows: tuple[int, ...], keys: tuple[int, ...]) -> VarlenProblem:
        return VarlenProblem(name, unit.dtype, rows, keys, 2, 1, dim, value_dim(unit))

    # Sequences without rows, without keys, with fewer keys than rows (rows that see none), one past a tile both ways.
    yield replace(base("ragged", (m + 1, 0, 5, 9, 3), (2 * n + 1, 7, 0, 4, 7)), right=0)
    # No mask; fewer columns than the kernel's, another number for values; bounds that exceed the sequences.
    full = base("full", (7, m, 0), (n + 3, n, 0))
    yield replace(
        full, heads_q=3, heads_kv=3, head_dim=dim // 2 + 8, head_dim_v=dim // 2 - 8, slack=70, wants_lse=False
    )
    # The window's left end inside a tile, its right end before and after the diagonal; a sink.
    window = base("window", (2 * m + 9, 4), (2 * m + 2 * n, n + 9))
    yield replace(window, left=n // 2 + 3, right=5, has_sinks=True)
    narrow = base("narrow window", (m + 70, 3), (n, 9))
    yield replace(narrow, left=1, right=0, has_sinks=True, has_counter=False)
    # A window with enough complete blocks inside that loops with lookahead run twice.
    yield replace(base("wide window", (m + 9,), (m + 8 * n,)), left=6 * max(n, 64) + 7, right=0, heads_q=1)
    # Complete tiles of keys before the window, which no query sees; a group of three.
    yield replace(base("unseen keys", (5, 1), (2 * n + 70, n + 1)), left=3, right=0, heads_q=3)
    # More rows than keys, with a sink: rows without a key only have the sink.
    yield replace(base("sinks", (m + 7, 2), (5, 0)), right=0, has_sinks=True, heads_q=4, heads_kv=2)
    # Scores on both sides of the bend of tanh.
    softcap = replace(base("softcap", (37, 2), (n + 3, 9)), softcap=7.0, magnitude=6.0)
    yield replace(softcap, mask=MaskTensor.ADDITIVE, mask_broadcast=(True, False, True))
    soft = replace(softcap, name="soft softcap", softcap=50.0, magnitude=1.0, rows=(m + 3, 2), keys=(m + 9, 3))
    yield replace(soft, left=m + 6, right=0, has_sinks=True)  # the first keys are in the window of a complete block
    if dim == SMALLEST:
        yield from diagonals(base("diagonals", (), ()), unit, max(64, n))
    # Complete blocks of values that are contiguous in memory, and tails.
    masked = replace(base("mask", (70, 70), (n + 10, n + 10)), rows_layout=Rows.DENSE, keys_layout=Keys.DENSE)
    yield replace(masked, mask=MaskTensor.BOOL, mask_broadcast=(False, True, False))
    yield replace(masked, name="additive mask", mask=MaskTensor.ADDITIVE, right=0, heads_q=4, heads_kv=2)
    # Dense rows and keys with unused room at the end; more tiles than blocks.
    dense = base("dense", (m + 3,) * 3, (n, n + 1, 0))
    yield replace(dense, rows_layout=Rows.DENSE, keys_layout=Keys.DENSE, spare_keys=n // 2 + 1, right=3)
    # Ragged keys with unused room at the end.
    yield replace(base("spare keys", (9, 5), (n - 3, 2)), spare_keys=7, left=40)
    # Logits so far below 0 that a score of 0, as for a missing key, has an infinite weight: dq of all keys is one
    # product.
    if unit.row.operation == FUSED:
        yield replace(base("low", (9, 3), (1, 2)), magnitude=100.0)
    # More sequences than a warp has lanes.
    rows = tuple(index % 3 for index in range(70))
    yield replace(base("many", (*rows, m + 5), (*rows, 9)), right=0, heads_q=1)
    # The same number of slots for every sequence: some without a tile, and zeros before and after all sequences and
    # beyond the most keys.
    if unit.row.schedule == "grid":
        short = base("equal slots", (m, 5, m - 3, 0, m), (n, 7, n - 1, 0, n))
        yield replace(short, right=0, spare_keys=n // 2 + 1)
        pairs = base("equal slots, two tiles", (2 * m, 2 * m - 1, m + 5, 2 * m), (2 * n, n - 1, 2 * n - 1, 2 * n))
        yield replace(pairs, heads_q=3, heads_kv=3)
        # Bounds larger than L2: heads in sections, with several tiles of each.
        yield replace(base("long bounds", (2 * m + 5, 3, m), (2 * n + 5, 9, n)), right=0, slack=1 << 20)
    # Tiles that add in order: the last head of the only long sequence goes down, the others go up.
    if unit.row.operation == FUSED:
        both = base("both directions", (n + 9, 3, m), (2 * n + 5, 3, n))
        yield replace(both, right=0, heads_q=3, heads_kv=3)
