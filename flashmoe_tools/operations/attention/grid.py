"""The problems of one table of a suite's ``cases``: each list is an axis, and the table means the product of its axes.

``tokens`` (batch * seq) and ``hidden`` (heads * head_dim) may replace ``batch`` and ``heads``, for grids of constant
work.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from flashmoe_tools.operations import DTYPE_BYTES, fields

LAYOUTS = ("bhsd", "bshd")
MAX_HEAD_DIM = 512
FIELDS = {"dtype", "head_dim", "value_dim", "causal", "layout", "seq", "seq_q", "seq_k"}
FIELDS |= {"batch", "tokens", "heads", "heads_kv", "hidden"}


def expand_row(row: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """The fields of each problem in the product of the row's axes, in the order of ``axes`` below."""
    fields.known(row, FIELDS, where)
    lengths = _lengths(row, where)
    axes = (
        [fields.choice(one, tuple(DTYPE_BYTES), where, "dtype") for one in fields.axis(row.get("dtype", "bf16"))],
        fields.counts(row, where, "head_dim"),
        [fields.flag(one, where, "causal") for one in fields.axis(row.get("causal", False))],
        [fields.choice(one, LAYOUTS, where, "layout") for one in fields.axis(row.get("layout", "bhsd"))],
        _one_of(row, where, "heads", "hidden"),
        _one_of(row, where, "batch", "tokens"),
        lengths,
    )
    for dtype, head_dim, causal, layout, (heads_word, heads), (batch_word, batch), (seq_q, seq_k) in itertools.product(
        *axes
    ):
        if causal and seq_q > seq_k:
            fields.fail(
                where, "causal", (seq_q, seq_k), "seq_q up to seq_k: the mask is bottom-right, so others see no key"
            )
        heads_q = heads if heads_word == "heads" else fields.divide(heads, head_dim, where, "hidden", "head_dim")
        heads_kv = fields.count(row.get("heads_kv", heads_q), where, "heads_kv")
        if heads_q % heads_kv:
            fields.fail(where, "heads_kv", heads_kv, f"a divisor of {heads_q} query heads")
        value_dim = fields.count(row.get("value_dim", head_dim), where, "value_dim")
        for name, columns in (("head_dim", head_dim), ("value_dim", value_dim)):
            if columns > MAX_HEAD_DIM:
                fields.fail(where, name, columns, f"at most {MAX_HEAD_DIM}")
        count = batch if batch_word == "batch" else fields.divide(batch, seq_q, where, "tokens", "seq")
        yield {
            "dtype": dtype,
            "batch": count,
            "heads_q": heads_q,
            "heads_kv": heads_kv,
            "seq_q": seq_q,
            "seq_k": seq_k,
            "head_dim": head_dim,
            "causal": causal,
            "layout": layout,
            "value_dim": None if value_dim == head_dim else value_dim,
        }


def _lengths(row: Mapping[str, Any], where: str) -> list[tuple[int, int]]:
    if ("seq" in row) == ("seq_q" in row or "seq_k" in row):
        fields.fail(
            where,
            "seq",
            {name: row[name] for name in ("seq", "seq_q", "seq_k") if name in row},
            "seq, or seq_q and seq_k",
        )
    if "seq" in row:
        return [(one, one) for one in fields.counts(row, where, "seq")]
    return list(itertools.product(fields.counts(row, where, "seq_q"), fields.counts(row, where, "seq_k")))


def _one_of(row: Mapping[str, Any], where: str, plain: str, product: str) -> list[tuple[str, int]]:
    if (plain in row) == (product in row):
        fields.fail(where, plain, row.get(plain), f"exactly one of {plain} and {product}")
    word = plain if plain in row else product
    return [(word, one) for one in fields.counts(row, where, word)]
