"""flashmoe in Hugging Face transformers: attention, experts and caches, through transformers' own registries.

    from flashmoe.integrations.transformers import register
    names = register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=names.attention, experts_implementation=names.experts)

No computation of transformers is patched; a model that cannot take attention by name is rejected (models.py). transformers treats
every attention whose name contains "flash" as a library to import, so the name here is "fmoe". Which of its registries accept
other libraries' names differs between versions: :func:`register` finds out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashmoe.errors import ArgumentError
from flashmoe.integrations.transformers.attention import (
    NAME,
    PAGED_NAME,
    attention_forward,
    attention_mask,
    paged_attention_forward,
)
from flashmoe.integrations.transformers.experts import experts_forward, fp8_experts_forward, recognise_gate
from flashmoe.integrations.transformers.latents import decode_by_latents
from flashmoe.integrations.transformers.models import check_models
from flashmoe.integrations.transformers.packed import packed_config, register_quantizers

if TYPE_CHECKING:
    from flashmoe.integrations.transformers.cache import E4m3Cache

__all__ = [
    "NAME",
    "PAGED_NAME",
    "E4m3Cache",
    "Registered",
    "attention_mask",
    "decode_by_latents",
    "packed_config",
    "recognise_gate",
    "register",
]


@dataclass(frozen=True)
class Registered:
    """The names to pass to transformers. ``experts`` and ``paged`` are None if this version of transformers does not accept other names."""

    attention: str
    experts: str | None  # None up to 4.57, which has no registry, and in early 5.x, which does not look names up there
    paged: str | None  # continuous batching; None up to 4.57, and from 5.19 on, which accepts only its own names


def register() -> Registered:
    """Make flashmoe known to transformers as an attention and an experts implementation; a second call changes nothing.

    Raises ArgumentError if transformers is not installed or has no registry of attention functions.
    """
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
    except ImportError as error:
        msg = f"transformers cannot be used ({error}); install transformers 4.57 or later"
        raise ArgumentError(msg) from error
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, attention_mask)
    check_models(PreTrainedModel, frozenset({NAME, PAGED_NAME}))
    is_paged = "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys()  # then every "paged|..." is looked up
    if is_paged:
        ALL_ATTENTION_FUNCTIONS.register(PAGED_NAME, paged_attention_forward)
    experts = _register_experts()
    if experts is not None:
        register_quantizers()
    return Registered(NAME, experts, PAGED_NAME if is_paged else None)


def _register_experts() -> str | None:
    from transformers import PreTrainedModel

    nobody: Any = PreTrainedModel  # passed as self, which the method does not use
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return None
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, fp8_experts_forward)
    try:
        PreTrainedModel.get_correct_experts_implementation(nobody, NAME)
    except ValueError:  # versions with a fixed list of names
        return None
    return NAME


def __getattr__(name: str) -> Any:
    if name != "E4m3Cache":
        msg = f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        raise AttributeError(msg)
    from flashmoe.integrations.transformers.cache import E4m3Cache

    return E4m3Cache
