"""Chooses the layers that flashmoe computes; the others go to vLLM's own choice, with one warning per reason."""

from __future__ import annotations

import warnings
from typing import Any

from flashmoe.errors import ArgumentError
from flashmoe.fallback import FALLBACK_VARIABLE, fallback_policy

_warned: set[str] = set()


def fall_back(selector: Any) -> None:
    """Wrap the function that chooses a layer's backend in vLLM; a second call changes nothing.

    If a layer cannot run on flashmoe, its backend is chosen as if none had been named. With FLASHMOE_FALLBACK=error
    such a model is rejected at start, by vLLM's own choice if it asks the backend, otherwise here, with the same reasons.
    """
    choose = selector._cached_get_attn_backend
    if getattr(choose, "is_flashmoe", False):
        return

    def chosen(backend: Any, attn_selector_config: Any, num_heads: int | None = None, **more: Any) -> Any:
        from vllm.platforms import current_platform

        from flashmoe.integrations.vllm.attention import FlashmoeBackend

        if backend is not None and backend.get_path() == _path(FlashmoeBackend):
            ours, reasons = _ours(attn_selector_config, num_heads, current_platform.get_device_capability())
            if reasons and fallback_policy() != "error":
                warn_once("attention", "; ".join(reasons))
                backend = None
            elif (
                current_platform.is_cpu() or ours is not FlashmoeBackend
            ):  # on a CPU vLLM does not ask the backend, and it knows only one class by the name
                if reasons:
                    msg = f"{backend} cannot run this model: {'; '.join(reasons)}; remove --attention-backend"
                    raise ArgumentError(msg)
                return ours
        return choose(backend, attn_selector_config, num_heads, **more)

    chosen.is_flashmoe = True  # type: ignore[attr-defined]
    if hasattr(choose, "cache_clear"):
        chosen.cache_clear = choose.cache_clear  # type: ignore[attr-defined]
    selector._cached_get_attn_backend = chosen


def _ours(config: Any, num_heads: int | None, capability: Any) -> tuple[Any, list[str]]:
    """flashmoe's class for a layer, and the reasons why it cannot be used."""
    from flashmoe.integrations.vllm.attention import FlashmoeBackend

    ours: Any = FlashmoeBackend
    unsupported_reason = None
    if getattr(config, "use_mla", False):
        from flashmoe.integrations.vllm import mla

        ours, unsupported_reason = mla.FlashmoeMLABackend, mla.unsupported_heads(num_heads)
    reasons = list(ours.validate_configuration(device_capability=capability, **config._asdict()))
    return ours, [*reasons, *([unsupported_reason] if unsupported_reason else [])]


def _path(backend: type) -> str:
    return f"{backend.__module__}.{backend.__qualname__}"


def warn_once(what: str, reasons: str) -> None:
    """Warns once per process for each text."""
    text = f"vLLM computes this model's {what}, not flashmoe: {reasons}; {FALLBACK_VARIABLE}=error rejects the model"
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=3)
