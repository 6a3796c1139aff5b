"""What a problem of ragged or paged attention with score options is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from flashmoe_build.emulation.runner import NamedProblem

UNBOUNDED = 1 << 30  # kUnbounded
LOG2E = math.log2(math.e)
SPARE_ROWS = 3  # query rows before the first sequence and after the last one


class Rows(str, Enum):
    """How query rows are stored."""

    DENSE = "dense"  # [batch, heads, rows, head_dim]; every sequence has the same number of rows
    RAGGED = "ragged"  # [total rows, heads, head_dim]


class Keys(str, Enum):
    """How keys and values are stored."""

    DENSE = "dense"  # [batch, heads, most keys, head_dim]; lengths in seqused_k
    RAGGED = "ragged"  # [total keys, heads, head_dim]
    PAGED = "paged"  # [pages, page size, heads, head_dim], in random order; lengths in seqused_k


class MaskTensor(str, Enum):
    """Ordered like the C++ enumeration."""

    NONE = "none"
    BOOL = "bool"
    ADDITIVE = "additive"
    ALIBI = "alibi"  # slopes [batch, heads] instead of a mask


def adds_alibi(options: Mapping[str, int]) -> bool:
    """Whether a kernel with these options adds ALiBi."""
    return bool(options.get("alibi")) or options.get("scores") == 2


@dataclass(frozen=True)
class VarlenProblem(NamedProblem):
    """A batch of sequences with ``rows[b]`` queries and ``keys[b]`` keys each, and its score options."""

    dtype: str
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    rows_layout: Rows = Rows.RAGGED
    keys_layout: Keys = Keys.RAGGED
    page_size: int = 0
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    softcap: float = 0.0
    has_sinks: bool = False
    mask: MaskTensor = MaskTensor.NONE
    mask_broadcast: tuple[bool, bool, bool] = (False, False, False)  # over batch, heads, rows
    has_lowest: bool = (
        False  # an additive mask hides with the type's lowest number: a row without other keys averages them
    )
    hides_blocks: bool = False  # an additive mask hides whole blocks of 64 rows and 64 keys, which kernels may skip
    visible_blocks: tuple[tuple[tuple[int, ...], ...], ...] = ()  # of keys: [matrix][row block]; drawn if empty
    spare_keys: int = 0  # unused room after each sequence's keys; if keys are ragged, also passes seqused_k
    slack: int = 0  # how much seq_q and seq_k exceed the longest sequence
    is_folded: bool = False  # one query position per sequence; the heads of a group are rows
    is_decoding: bool = False  # the kernel itself treats the heads of a group as rows
    magnitude: float = 1.0  # of q
    is_exact: bool = False  # integers whose results are known bit for bit (attention/emulation/recurrence.py)
    is_consistent: bool = False
    splits: int = 1
    max_decode: int = (
        0  # a decoding kernel processes the sequences with up to this many rows, a prefill kernel all others
    )
    wants_lse: bool = True
    has_counter: bool = True
    dropout_p: float = 0.0
    data_seed: int = 0

    @property
    def rng_state(self) -> tuple[int, int]:
        """Seed and offset of the dropout; both have more than 32 bits."""
        return 0x9E3779B97F4A7C15 * (self.data_seed + 1) % (1 << 63), (self.data_seed << 33) + 5

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_kv

    @property
    def num_splits(self) -> int:
        if not self.max_decode:
            return self.splits
        return -1 if self.is_decoding else -self.max_decode

    def is_skipped(self, sequence: int) -> bool:
        """Whether another kernel processes this sequence."""
        return self.max_decode > 0 and (self.rows[sequence] > self.max_decode) == self.is_decoding

    @property
    def has_score_functions(self) -> bool:
        return self.softcap > 0 or self.mask is not MaskTensor.NONE

    @property
    def has_mask_tensor(self) -> bool:
        return self.mask in (MaskTensor.BOOL, MaskTensor.ADDITIVE)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def max_rows(self) -> int:
        if self.max_decode and self.is_decoding:
            return self.max_decode
        return self.group if self.is_folded else max(self.rows) + (self.slack if self.rows_layout is Rows.RAGGED else 0)

    @property
    def max_keys(self) -> int:
        """seq_k; for dense keys the tensor's size."""
        return max(self.keys) + (self.spare_keys if self.keys_layout is Keys.DENSE else self.slack)
