"""The models of transformers that can take attention by name: their layers call its attention interface, with a mask of the same meaning.

transformers accepts a registered name for every model. A model that does not look the name up runs its own attention with a mask made for
another function: BLOOM's logits were off by 0.06, MPT's by more than their size, and GPT-J ended in KeyError: 'fmoe'.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any

from flashmoe.errors import ArgumentError

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
OWN_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)
# They convert a layer's mask into another, assuming that it is added to the scores.
CHANGES_ITS_MASK = frozenset({"deepseek_v4"})


def unsupported_reason(model: type) -> str | None:
    """Why this class of models cannot take attention by name; None if it can, or has no attention of its own to replace."""
    source = _source(model.__module__)
    has_attention, dispatches = OWN_ATTENTION.search(source) is not None, INTERFACE in source
    is_sdpa = bool(getattr(model, "_supports_sdpa", False))
    is_backend = bool(getattr(model, "_supports_attention_backend", False))
    if has_attention and not dispatches and not is_backend:
        return "its layers do not call transformers' attention interface"
    if model.__module__.startswith("transformers.") and dispatches and not (is_sdpa or is_backend):
        return "transformers says that its attention cannot be replaced"
    if getattr(getattr(model, "config_class", None), "model_type", None) in CHANGES_ITS_MASK:
        return "it adds values to its layers' masks, which must be boolean here"
    return None


@cache
def _source(module: str) -> str:
    """The source of a loaded module; empty if it has no file, and then nothing is known about it."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


def check_supported(model: type, name: str) -> None:
    """Raise ArgumentError for a model that cannot take ``name``."""
    reason = unsupported_reason(model)
    if reason is None:
        return
    instead = "attn_implementation='eager'"
    if getattr(model, "_supports_sdpa", False):
        instead = "attn_implementation='sdpa' after flashmoe.activate()"
    msg = f"{model.__name__} cannot take attn_implementation={name!r}: {reason}; use {instead}"
    raise ArgumentError(msg)


def check_models(base: Any, names: frozenset[str]) -> None:
    """Make transformers check each of ``names`` when a model is built or its attention is set; a second call changes nothing.

    This is the only function of transformers that is wrapped: its own check of whether a class of models accepts a name.
    """
    ask = base.get_correct_attn_implementation
    if getattr(ask, "is_flashmoe", False):
        return

    def asked(self: Any, requested_attention: str | None, *arguments: Any, **options: Any) -> Any:
        if requested_attention in names:
            check_supported(type(self), requested_attention)
        return ask(self, requested_attention, *arguments, **options)

    asked.is_flashmoe = True  # type: ignore[attr-defined]
    base.get_correct_attn_implementation = asked
