"""Compiles the kernel selector with the real table, so that its choices for every GPU are tested without one."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from flashmoe_build.compile.codegen import PlacedBinary, kernel_table_source  # noqa: E402
from flashmoe_build.compile.toolchain import find_toolchain  # noqa: E402
from flashmoe_tools.tables import load_tables  # noqa: E402


@dataclass(frozen=True)
class Choice:
    symbol: str
    target: str
    splits: int


class RefusedError(Exception):
    """The selector's error text."""


Chooser = Callable[..., Choice]


def prefers_folded(
    loaded: ctypes.CDLL,
    capability: int,
    *,
    rows: int,
    keys: int,
    head_dim: int = 128,
    batch: int = 1,
    heads_kv: int = 8,
    group: int = 4,
    forced: str | None = None,
    multiprocessors: int = 132,
    consistent: bool = False,
    causal: bool = True,
) -> bool:
    sizes = (ctypes.c_longlong * 6)(batch, heads_kv * group, heads_kv, rows, keys, consistent)
    name = forced.encode() if forced is not None else None
    return bool(loaded.prefers_folded(capability, multiprocessors, name, True, causal, head_dim, sizes))


def _refusal(
    loaded: ctypes.CDLL, which: int, head_dim: int = 64, page_size: int = 0, flags: int = 0, forced: str | None = None
) -> str:
    answer = ctypes.create_string_buffer(4096)
    name = forced.encode() if forced is not None else None
    loaded.refusal(which, name, head_dim, page_size, flags, answer, len(answer))
    return answer.value.decode()


def varlen_backward(loaded: ctypes.CDLL, capability: int, head_dim: int, head_dim_v: int, bf16: bool) -> list[str]:
    """Symbols: without options, with a softcap or mask tensor, with ALiBi, with a streamed mask, in this order."""
    answer = ctypes.create_string_buffer(4096)
    loaded.choose_more(capability, None, bf16, head_dim, head_dim_v, answer, len(answer))
    kinds = ("flashmoe_attention_varlen_backward", "flashmoe_attention_mask_backward")
    return [symbol for symbol in answer.value.decode().split()[::2] if symbol.startswith(kinds)]


def mask_forward(
    loaded: ctypes.CDLL, capability: int, head_dim: int, *, bf16: bool, forced: str | None, **sizes: int
) -> str:
    """The symbol of the kernel that streams a mask, or "". ``sizes``: rows, keys, heads, batch, multiprocessors."""
    answer = ctypes.create_string_buffer(256)
    name = forced.encode() if forced is not None else None
    numbers = (ctypes.c_longlong * 5)(*(sizes[of] for of in ("rows", "keys", "heads", "batch", "multiprocessors")))
    loaded.choose_mask_forward(capability, name, bf16, head_dim, numbers, answer, len(answer))
    return answer.value.decode()


def compile_with_table(folder: Path, targets: tuple[str, ...] | None, *sources: Path) -> ctypes.CDLL:
    """A library of these files, the search for a kernel, and the kernel table for ``targets``."""
    tables = load_tables()
    placed = [PlacedBinary(unit, 0, 0, "") for unit in tables.units(targets)]
    (folder / "table.cpp").write_text(kernel_table_source(tables, placed))
    files = (folder / "table.cpp", ROOT / "csrc" / "host" / "find_kernels.cpp", *sources)
    flags = ("-std=c++17", "-O0", "-shared", "-fPIC", "-Wl,--exclude-libs,ALL", "-Wall", "-Wextra", "-Werror")
    command = [find_toolchain().cxx, *flags, f"-I{ROOT / 'csrc'}", *map(str, files), "-o", str(folder / "select.so")]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "select.so"))


def compile_chooser(folder: Path, targets: tuple[str, ...] | None) -> Chooser:
    selection = sorted((ROOT / "csrc" / "attention" / "host").glob("select*.cpp"))
    loaded = compile_with_table(folder, targets, Path(__file__).with_name("chooser.cpp"), *selection)
    function = loaded.choose

    def choose(
        capability: int,
        *,
        head_dim: int = 128,
        batch: int = 4,
        heads: int = 32,
        kv_heads: int | None = None,
        seq_q: int = 4096,
        seq_k: int = 4096,
        causal: bool = False,
        bf16: bool = False,
        forced: str | None = None,
        multiprocessors: int = 132,
        consistent: bool = False,
    ) -> Choice:
        sizes = (ctypes.c_longlong * 6)(batch, heads, kv_heads or heads, seq_q, seq_k, consistent)
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        status = function(capability, multiprocessors, name, bf16, causal, head_dim, sizes, answer, len(answer))
        text = answer.value.decode()
        if status != 0:
            raise RefusedError(text)
        symbol, target, splits = text.split()
        return Choice(symbol, target, int(splits))

    def choose_backward(
        capability: int, head_dim: int, *, causal: bool = False, bf16: bool = False, forced: str | None = None
    ) -> tuple[str, ...]:
        """Symbols of the dq and dkv kernels, the fused one and its two helpers if any, and the target; () if none."""
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        loaded.choose_backward(capability, name, bf16, causal, head_dim, answer, len(answer))
        return tuple(answer.value.decode().split())

    def choose_more(
        capability: int, head_dim: int, *, head_dim_v: int | None = None, bf16: bool = False, forced: str | None = None
    ) -> set[tuple[str, str]]:
        """(symbol, target) of each kernel that choose_more of chooser.cpp writes."""
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        loaded.choose_more(capability, name, bf16, head_dim, head_dim_v or head_dim, answer, len(answer))
        words = answer.value.decode().split()
        return set(zip(words[::2], words[1::2], strict=True))

    def choose_varlen(
        capability: int,
        head_dim: int,
        *,
        rows: int,
        keys: int = 4096,
        heads: int = 32,
        batch: int = 64,
        rows_total: int = 0,
        page_size: int = 0,
        has_score_functions: bool = False,
        bf16: bool = False,
        forced: str | None = None,
        consistent: bool = False,
        alibi: bool = False,
        head_dim_v: int | None = None,
        heads_kv: int = 1,
        group: int = 1,
        batch_invariant: bool = False,
    ) -> tuple[str, ...]:
        """Symbol and target; if keys are divided, also the combine kernel's and the number of splits; () if none fits.

        group: the query heads per key head."""
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        lengths = (rows, keys, heads, batch, rows_total, consistent, alibi, head_dim_v or head_dim)
        lengths += (heads_kv, rows * group, batch_invariant)
        sizes = (ctypes.c_longlong * len(lengths))(*lengths)
        status = loaded.choose_varlen(
            capability, name, bf16, head_dim, page_size, sizes, has_score_functions, answer, len(answer)
        )
        return tuple(answer.value.decode().split()) if status == 0 else ()

    def choose_ordered(
        capability: int,
        head_dim: int,
        *,
        rows: int = 4,
        keys: int = 4096,
        heads: int = 8,
        batch: int = 1,
        has_score_functions: bool = False,
        bf16: bool = True,
        forced: str | None = None,
        consistent: bool = True,
        alibi: bool = False,
        head_dim_v: int | None = None,
        multiprocessors: int = 132,
    ) -> tuple[str, ...]:
        """Symbols of the two kernels; () if another kernel runs the call."""
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        lengths = (rows, keys, heads, batch, 0, consistent, alibi, head_dim_v or head_dim, multiprocessors)
        sizes = (ctypes.c_longlong * len(lengths))(*lengths)
        loaded.choose_ordered(capability, name, bf16, head_dim, sizes, has_score_functions, answer, len(answer))
        return tuple(answer.value.decode().split())

    def choose_chunk(
        capability: int,
        head_dim: int,
        *,
        rows: int,
        keys: int,
        heads_kv: int = 8,
        group: int = 4,
        batch: int = 1,
        rows_total: int = 0,
        page_size: int = 0,
        num_splits: int = 0,
        multiprocessors: int = 132,
        seen: int | None = None,
        causal: bool = True,
        has_score_functions: bool = False,
        bf16: bool = True,
        forced: str | None = None,
        consistent: bool = False,
        head_dim_v: int | None = None,
    ) -> tuple[str, int]:
        """Symbol and number of splits; ("", 0) if the ragged or the decoding kernel stays."""
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        lengths = (rows, keys, heads_kv, group, batch, rows_total, page_size, num_splits, multiprocessors)
        lengths += (keys if seen is None else seen, causal)
        sizes = (ctypes.c_longlong * len(lengths))(*lengths)
        given = (bf16, head_dim, head_dim_v or head_dim, sizes, has_score_functions, consistent)
        loaded.choose_chunk(capability, name, *given, answer, len(answer))
        words = answer.value.decode().split()
        if not words:
            return "", 0
        assert (len(words) == 3) == (int(words[1]) > 1)  # splits have a second kernel
        return words[0], int(words[1])

    def prefers_fused(capability: int, head_dim: int, causal: bool, *sizes: int, group: int = 1) -> bool:
        """sizes: batch, key heads, rows, keys."""
        found = loaded.prefers_fused(capability, head_dim, causal, (ctypes.c_longlong * 5)(*sizes, group))
        if found < 0:
            raise RuntimeError("refused")
        return bool(found)

    def prefers_varlen_fused(
        head_dim: int,
        heads: int,
        longest: int,
        total: int,
        *,
        causal: bool = True,
        bends: bool = False,
        window: int = 1 << 31,
    ) -> bool:
        """For a ragged batch with as many rows as keys."""
        sizes = (ctypes.c_longlong * 6)(heads, longest, longest, total, total, window)
        return bool(loaded.prefers_varlen_fused(head_dim, causal, bends, sizes))

    choose.refusal = partial(_refusal, loaded)  # type: ignore[attr-defined]
    choose.ordered = choose_ordered  # type: ignore[attr-defined]
    choose.chunk = choose_chunk  # type: ignore[attr-defined]
    choose.folds = partial(prefers_folded, loaded)  # type: ignore[attr-defined]
    choose.fused = prefers_fused  # type: ignore[attr-defined]
    choose.varlen_fused = prefers_varlen_fused  # type: ignore[attr-defined]
    choose.backward = choose_backward  # type: ignore[attr-defined]
    choose.varlen = choose_varlen  # type: ignore[attr-defined]
    choose.more = choose_more  # type: ignore[attr-defined]
    choose.varlen_backward = partial(varlen_backward, loaded)  # type: ignore[attr-defined]
    choose.mask_forward = partial(mask_forward, loaded)  # type: ignore[attr-defined]
    return choose


@pytest.fixture(scope="session")
def choose(tmp_path_factory: pytest.TempPathFactory) -> Chooser:
    """With every target of the table."""
    return compile_chooser(tmp_path_factory.mktemp("select"), None)


@pytest.fixture(scope="session")
def choose_of_hopper_build(tmp_path_factory: pytest.TempPathFactory) -> Chooser:
    """With the targets of FLASHMOE_ARCHS=90a."""
    return compile_chooser(tmp_path_factory.mktemp("select90"), ("sm_90a",))


@pytest.fixture(scope="session")
def choose_of_cpu_build(tmp_path_factory: pytest.TempPathFactory) -> Chooser:
    """With FLASHMOE_ARCHS=none."""
    return compile_chooser(tmp_path_factory.mktemp("select0"), ())
