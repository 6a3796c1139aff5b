"""Numerical correctness: a grid of shapes under the error rule, and by name the lengths at which an index inside a tile was once wrong."""

from itertools import count, product

import pytest
import torch

from flashmoe_tools.tables import load_tables

from .reference import DTYPES, Problem, check_attention, make_inputs

HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    (1, 239),
    (3, 799),
    (64, 64),
    (65, 65),
    (113, 203),
    (128, 128),
    (192, 192),
    (256, 256),
    (512, 512),
    (799, 3),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
)
KINDS = ("normal", "shifted", "logits", "outlier")
HEADS = ((2, 2), (2, 1), (8, 1))  # groups of 1, 2 and 8 query heads per key head
NAMED_LENGTHS = (4, 32, 64, 65, 128, 192, 256, 512)


def _problem(head_dim: int, lengths: tuple[int, int], heads: tuple[int, int], causal: bool) -> Problem:
    seq_q, seq_k = lengths
    batch = 2 if seq_q * seq_k <= 128 * 128 else 1
    return Problem(seq_q, seq_k, head_dim, *heads, batch=batch, causal=causal)


def _check(problem: Problem, device: str, dtype: torch.dtype, kind: str, *, bshd: bool, seed: int) -> None:
    q, k, v = make_inputs(problem, device, dtype, kind, bshd=bshd, seed=seed)
    check_attention(q, k, v, problem.causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", NAMED_LENGTHS, ids=lambda length: f"S{length}")
def test_named_length_at_head_dim_64(length: int, causal: bool, device: str) -> None:
    for dtype, heads in product(DTYPES[device], ((3, 3), (4, 2))):
        problem = Problem(length, length, 64, *heads, batch=2, causal=causal)
        _check(problem, device, dtype, "normal", bshd=False, seed=length)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"q{lengths[0]}k{lengths[1]}")
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda head_dim: f"D{head_dim}")
def test_grid(head_dim: int, lengths: tuple[int, int], causal: bool, device: str) -> None:
    """On a GPU every dtype and group size; on the CPU one of each per cell, in rotation, with 2048 rows only at every fourth head dim."""
    place = LENGTHS.index(lengths)
    if device == "cpu" and lengths == (2048, 2048) and HEAD_DIMS.index(head_dim) % 4 != 3:
        lengths = (203, 2048)
    cell = HEAD_DIMS.index(head_dim) + 5 * place + causal
    variants = list(product(DTYPES[device], HEADS))
    if device == "cpu":
        dtype, heads = variants[(cell * 4) % len(variants)]
        is_long = min(lengths) > 512  # one head: with more these would take as long as all shorter cells together
        variants = [(dtype, (1, 1) if is_long else heads)]
    for seed, (dtype, heads) in zip(count(cell), variants, strict=False):
        problem = _problem(head_dim, lengths, heads, causal)
        _check(problem, device, dtype, KINDS[seed % 4], bshd=seed % 2 == 1, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}q{heads[1]}kv")
def test_groups_and_kinds_of_input(heads: tuple[int, int], kind: str, device: str) -> None:
    for dtype, causal, head_dim in product(DTYPES[device], (False, True), (64, 128)):
        _check(_problem(head_dim, (113, 203), heads, causal), device, dtype, kind, bshd=True, seed=7)


@pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 8, 9, 16, 31, 33, 63, 65, 127, 129, 255])
def test_odd_head_dims(head_dim: int, device: str) -> None:
    for dtype, causal in product(DTYPES[device], (False, True)):
        _check(_problem(head_dim, (65, 70), (2, 1), causal), device, dtype, "normal", bshd=causal, seed=head_dim)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.0, 0.01])
def test_scale(scale: float, device: str) -> None:
    for dtype, causal in product(DTYPES[device], (False, True)):
        q, k, v = make_inputs(Problem(65, 90), device, dtype)
        check_attention(q, k, v, causal, scale)


def test_every_length_up_to_two_tiles(device: str) -> None:
    """No length is special: all from 1 to 160, with another length for the keys."""
    dtype = torch.float16
    for seq_q in range(1, 161):
        problem = Problem(seq_q, (seq_q * 7) % 161 + 1, 64, 1, 1, causal=seq_q % 2 == 0)
        _check(problem, device, dtype, "normal", bshd=False, seed=seq_q)


def _families() -> list[str]:
    """Kernel families that the table has for this machine's GPU; without a GPU those of the newest one, so that the tests are counted."""
    tables = load_tables()
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    known = [gpu for gpu in tables.gpus if gpu.compute_capability <= capability]
    families = max(known, key=lambda gpu: gpu.compute_capability).families
    return [name for name in families if any(row.family == name for row in tables.kernels)]


def _has_kernel(family: str, dtype: torch.dtype, head_dim: int) -> bool:
    word = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    rows = [row for row in load_tables().kernels if row.family == family and word in row.dtypes]
    return any(row.operation == "attention_forward" and row.axes["head_dim"] >= head_dim for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"q{lengths[0]}k{lengths[1]}")
@pytest.mark.parametrize("family", _families())
def test_every_family_of_this_gpu(
    family: str, lengths: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each family that this GPU runs, forced, including those that the selector would not choose."""
    from flashmoe import _extension

    monkeypatch.setenv("FLASHMOE_KERNEL", family)
    compared = 0
    for cell, (head_dim, dtype) in enumerate(product(HEAD_DIMS, DTYPES["cuda"])):
        if _has_kernel(family, dtype, head_dim):
            problem = _problem(head_dim, lengths, HEADS[cell % 3], causal)
            _check(problem, "cuda", dtype, KINDS[cell % 4], bshd=cell % 2 == 1, seed=cell)
            kernel = _extension.last_kernel()  # a combine kernel sums the partial results of any family
            assert f"_{family}_" in kernel or kernel.startswith("flashmoe_attention_combine_")
            compared += 1
    assert compared > 0, f"the table has rows for {family} but none for attention"


def _problems_of_every_kind(head_dim: int, causal: bool) -> list[Problem]:
    """Problems that a selector distinguishes: few and many query tiles, few and many keys, rows that fit a tile badly."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = (
        (64, 64, 1),
        (100, 4000, 2),  # few tiles, many keys
        (512, 512, 2 * blocks),
        (256, 256, blocks // 2 - 2),  # one wave of 128-row tiles
        (256, 1100, 2 * blocks),  # rows that waste half of a second tile of 192
        (576, 3000, blocks),
    )
    return [Problem(seq_q, seq_k, head_dim, heads, heads, causal=causal) for seq_q, seq_k, heads in sizes]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", _families())
def test_every_kernel_of_a_family_is_chosen_for_something_and_right(
    family: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashmoe import _extension

    monkeypatch.setenv("FLASHMOE_KERNEL", family)
    rows = [row for row in load_tables().kernels if row.family == family and row.operation == "attention_forward"]
    for dtype, word in ((torch.float16, "f16"), (torch.bfloat16, "bf16")):
        for mask in ("full", "causal"):
            served = [
                row
                for row in rows
                if row.axes["head_dim"] == head_dim and word in row.dtypes and mask in row.words["mask"]
            ]
            launched = set()
            for seed, problem in enumerate(_problems_of_every_kind(head_dim, mask == "causal")) if served else ():
                _check(problem, "cuda", dtype, KINDS[seed % 4], bshd=seed % 2 == 1, seed=seed)
                launched.add(_extension.last_kernel())
            prefix = f"flashmoe_attention_forward_{family}_{word}_d{head_dim}"
            assert launched == {f"{prefix}{'_' + row.variant if row.variant else ''}_{mask}" for row in served}
