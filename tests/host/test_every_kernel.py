"""Every kernel of attention is chosen for some problem on some GPU: one that never is costs build time and bytes."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from flashmoe_tools.tables import Unit, load_tables

Chooser = Callable[..., Any]
Chosen = set[tuple[str, str]]  # symbol and target
TABLES = load_tables()
UNITS = [unit for unit in TABLES.units() if unit.row.operation.startswith("attention_")]
BEYOND_THE_TABLE = 130  # the capability of a later GPU, which loads the PTX
CAPABILITIES = {10 * gpu.compute_capability[0] + gpu.compute_capability[1]: gpu for gpu in TABLES.gpus}
SIZES = (  # batch, heads, seq_q, seq_k
    (8, 16, 8192, 8192),  # many query tiles
    (32, 32, 512, 512),  # short sequences
    (1, 8, 128, 128),  # fewer query tiles than multiprocessors
    (8, 8, 256, 256),  # a last wave of few tiles
    (4, 16, 512, 8192),
    (1, 8, 4, 8192),  # few query rows, many keys: divided over several blocks
)
VARLEN = (  # rows, page_size, a softcap or mask tensor, ALiBi
    (4096, 0, False, False),
    (4096, 0, True, False),
    (4096, 0, False, True),
    (4096, 3, False, False),
    (4096, 3, False, True),
    (64, 0, False, False),
    (1, 16, True, False),
    (1, 16, False, True),
)


def families(capability: int) -> tuple[str, ...]:
    return CAPABILITIES[min(capability, max(CAPABILITIES))].families


def loads_best(unit: Unit) -> int:
    """The capability for which no other target is better."""
    major, minor = unit.target.capability
    return BEYOND_THE_TABLE if unit.target.is_ptx else 10 * major + minor


def varlen_kernels(
    choose: Chooser, capability: int, head_dim: int, head_dim_v: int, bf16: bool, forced: str | None
) -> Chosen:
    """Ragged, paged, windowed attention: many rows, score options, pages that TMA cannot load, few rows, decoding."""
    asked = (
        choose.varlen(  # type: ignore[attr-defined]
            capability,
            head_dim,
            rows=rows,
            page_size=page_size,
            has_score_functions=functions,
            alibi=alibi,
            head_dim_v=head_dim_v,
            bf16=bf16,
            forced=forced,
        )
        for rows, page_size, functions, alibi in VARLEN
    )
    given = {"head_dim_v": head_dim_v, "bf16": bf16, "forced": forced}
    folded = choose.varlen(capability, head_dim, rows=4, heads=8, heads_kv=8, consistent=True, **given)  # type: ignore[attr-defined]
    ordered = choose.ordered(capability, head_dim, **given)  # type: ignore[attr-defined]
    chunk = choose.chunk(capability, head_dim, head_dim_v=head_dim_v, bf16=bf16, forced=forced, rows=128, keys=8192)  # type: ignore[attr-defined]
    scored = choose.chunk(
        capability,
        head_dim,
        head_dim_v=head_dim_v,
        bf16=bf16,
        forced=forced,
        rows=20,
        keys=8192,
        has_score_functions=True,
    )  # type: ignore[attr-defined]
    more: Chosen = choose.more(capability, head_dim, head_dim_v=head_dim_v, bf16=bf16, forced=forced)  # type: ignore[attr-defined]
    ordered = (*ordered, *(one[0] for one in (chunk, scored) if one[0]))
    chosen = {pair for words in (*asked, folded) for pair in (words[:2], words[2:4]) if pair}
    return more | chosen | {(symbol, "sm_90a") for symbol in ordered}


@pytest.fixture(scope="module")
def asked(choose: Chooser) -> dict[bool, Chosen]:
    """What is chosen over a grid of problems, by whether FLASHMOE_KERNEL names the family."""
    found: dict[bool, Chosen] = {False: set(), True: set()}
    for capability in (*CAPABILITIES, BEYOND_THE_TABLE):
        able = {(unit.row.family, unit.dtype) for unit in UNITS if loads_best(unit) == capability}
        grid = product((None, *families(capability)), ("f16", "bf16"), (64, 128, 256), (False, True), SIZES)
        for forced, dtype, head_dim, causal, (batch, heads, seq_q, seq_k) in grid:
            if (forced or families(capability)[0], dtype) not in able:
                continue
            choice = choose(
                capability,
                head_dim=head_dim,
                batch=batch,
                heads=heads,
                seq_q=seq_q,
                seq_k=seq_k,
                causal=causal,
                bf16=dtype == "bf16",
                forced=forced,
            )
            found[forced is not None].add((choice.symbol, choice.target))
            is_bf16 = dtype == "bf16"
            both = choose.backward(capability, head_dim, causal=causal, bf16=is_bf16, forced=forced)  # type: ignore[attr-defined]
            *backward, target = both or [""]
            found[forced is not None] |= {(symbol, target) for symbol in backward}
            for of_keys, of_values in ((head_dim, head_dim), (192, 128), (512, 512)):
                found[forced is not None] |= varlen_kernels(choose, capability, of_keys, of_values, is_bf16, forced)
            if choice.splits > 1:
                found[forced is not None].add((f"flashmoe_attention_combine_sm80_{dtype}_d256", choice.target))
    return found


def test_every_kernel_is_chosen(asked: dict[bool, Chosen]) -> None:
    """Without being named if its family is the GPU's best; by name if it is only a fallback, and for comparison."""
    never = [
        f"{entry.symbol} for {unit.target.name} ({unit.row.source})"
        for unit in UNITS
        for entry in unit.entries
        if (entry.symbol, unit.target.name) not in asked[False]
        and (unit.row.family == families(loads_best(unit))[0] or (entry.symbol, unit.target.name) not in asked[True])
    ]
    assert never == [], "drop the row, or change what select.cpp or the row's cost says of it"


def test_no_sums_of_dq_where_memory_is_short(choose: Chooser, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_fused in (("", True), ("0", True), ("1", False)):
        monkeypatch.setenv("FLASHMOE_SPLIT_BACKWARD", value)
        assert choose.fused(90, 64, True, 4, 32, 4096, 4096) == is_fused  # type: ignore[attr-defined]
    monkeypatch.setenv("FLASHMOE_SPLIT_BACKWARD", "often")
    with pytest.raises(RuntimeError, match="refused"):
        choose.fused(90, 64, True, 4, 32, 4096, 4096)  # type: ignore[attr-defined]


def test_head_dims_above_256_divide_the_keys_of_few_dense_rows(choose: Chooser) -> None:
    name, combine = "flashmoe_attention_varlen_forward_sm80_f16_d512", "flashmoe_attention_combine_sm80_f16_d512"

    def chosen(**given: Any) -> tuple[str, ...]:
        usual = {"rows": 8, "heads": 1, "batch": 1, "keys": 8192}
        found: tuple[str, ...] = choose.varlen(90, **{"head_dim": 320, **usual, **given})  # type: ignore[attr-defined]
        return found

    def divided(splits: int, target: str = "sm_90a") -> tuple[str, ...]:
        return (f"{name}_split", target, combine, target, str(splits))

    assert chosen() == divided(32)  # lanes of the warp that adds up
    assert chosen(batch=8) == divided(16)  # 132 multiprocessors
    assert chosen(batch=200) == divided(1)
    assert chosen(keys=1000) == divided(7)
    assert chosen(keys=10) == divided(1)
    assert chosen(page_size=3, has_score_functions=True) == divided(32)
    assert chosen(batch_invariant=True) == divided(1)
    assert chosen(head_dim_v=64)[2].endswith("_d256")
    # Cases that may not be divided, or need not be.
    for given in (
        {"consistent": True},
        {"rows_total": 8},
        {"rows": 17, "batch_invariant": True},
        {"rows": 17, "keys": 1023},
        {"rows": 64, "batch": 34},
    ):
        assert chosen(**given) == (name, "sm_90a"), given
    # More rows run on wgmma, without score functions, and if the call's bits may depend on it.
    own = ("flashmoe_attention_varlen_forward_sm90_f16_d512", "sm_90a")
    assert chosen(rows=65) == chosen(rows=700, rows_total=900) == chosen(rows=65, page_size=8) == own
    given = ({"consistent": True}, {"batch_invariant": True}, {"has_score_functions": True}, {"page_size": 3})
    assert all(chosen(rows=700, **one) == (name, "sm_90a") for one in given)
    assert chosen(rows=64, batch=33) == divided(1)
    assert chosen(rows=17) == divided(32)
    # There is none for ALiBi and none on Turing, and narrower head dims are never divided in this way.
    assert chosen(alibi=True) == ()
    assert choose.varlen(75, 320, rows=8) == ()  # type: ignore[attr-defined]
    assert choose.varlen(80, 256, rows=64, heads=1, batch=1)[0].endswith("_d256")  # type: ignore[attr-defined]


def test_short_tiles_have_the_keys_of_the_others() -> None:
    """The tile of a batch depends on its other sequences; the bits of a sequence must not."""
    ragged = [unit for unit in UNITS if unit.row.operation == "attention_varlen_forward"]
    keys = {(unit.name, unit.target.name): unit.row.block_n for unit in ragged}
    short = [unit for unit in ragged if unit.row.variant == "m64"]
    assert len(short) == 14
    for unit in short:
        assert keys[unit.name.removesuffix("_m64"), unit.target.name] == unit.row.block_n, unit.name


def test_dropout_and_a_mask_s_gradient_run_on_the_best_family_that_has_them(choose: Chooser) -> None:
    """On Hopper that is sm80, with exceptions on sm90, which has no other kernels if it is named.

    The exceptions: forward passes without a mask tensor or softcap; without ALiBi also the fused backward form and
    the backward form of more than 128 columns."""
    for capability, forced, family, target in (
        (90, None, "sm80", "sm_90a"),
        (90, "sm75", "sm75", "sm_90a"),
        (80, None, "sm80", "sm_80"),
        (75, None, "sm75", "sm_75"),
        (BEYOND_THE_TABLE, None, "sm80", "compute_80"),
    ):
        found = choose.more(capability, 72, forced=forced)  # type: ignore[attr-defined]
        is_hopper = (capability, forced) == (90, None)
        for kind in ("forward", "backward_dq", "backward_dkv"):
            name = f"flashmoe_attention_dropout_{kind}_{family}_f16_d128"
            assert (name, target) in found
            assert ((f"{name}_alibi", target) in found) is not (is_hopper and kind == "forward")
        name = f"flashmoe_attention_bias_gradient_{family}_f16_d128"
        assert {(name, target), (f"{name}_dropout", target)} <= found
        assert (("flashmoe_attention_bias_gradient_sm90_f16_d128", target) in found) is is_hopper
        hopper = {symbol for symbol, _ in found if "dropout" in symbol and "sm90" in symbol}
        names = ("forward_sm90_f16_d128", "forward_sm90_f16_d128_alibi", "backward_fused_sm90_f16_d128")
        assert hopper == ({f"flashmoe_attention_dropout_{name}" for name in names} if is_hopper else set())
    alone = {symbol for symbol, _ in choose.more(90, 72, forced="sm90") if "dropout" in symbol}  # type: ignore[attr-defined]
    assert alone == {"flashmoe_attention_dropout_forward_sm90_f16_d128"}
    wide = {symbol for symbol, _ in choose.more(90, 200) if "dropout_backward" in symbol}  # type: ignore[attr-defined]
    kinds = (
        "dq_sm90_f16_d256",
        "dkv_sm90_f16_d256",
        *(f"{kind}_sm80_f16_d256{and_}" for kind in ("dq", "dkv") for and_ in ("", "_alibi")),
    )
    assert wide == {f"flashmoe_attention_dropout_backward_{kind}" for kind in kinds}
