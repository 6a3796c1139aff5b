"""flashmoe as a vLLM plug-in: ``vllm serve MODEL --attention-backend CUSTOM``. Experimental: docs/integrations.md says what was run.

vLLM calls :func:`register` in each of its processes, through the entry point group ``vllm.general_plugins``. Nothing changes by default:
attention is used if ``CUSTOM`` (from 0.33 on also ``FLASHMOE``) is chosen, experts if FLASHMOE_VLLM_EXPERTS is 1.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from flashmoe.errors import ArgumentError

NAME = "FLASHMOE"
BACKEND = "flashmoe.integrations.vllm.attention.FlashmoeBackend"
EXPERTS_VARIABLE = "FLASHMOE_VLLM_EXPERTS"


def register() -> None:
    """Make flashmoe known to vLLM as an attention backend, and for its experts if requested; a second call changes nothing.

    Raises ArgumentError if vLLM cannot be imported. Does not use the GPU.
    """
    try:
        from vllm.v1.attention import selector
        from vllm.v1.attention.backends import registry
    except ImportError as error:
        msg = f"vLLM cannot be used ({error}); install vLLM 0.24 or later, or exclude flashmoe with VLLM_PLUGINS"
        raise ArgumentError(msg) from error
    _register_attention(registry)
    from flashmoe.integrations.vllm.selection import fall_back

    fall_back(selector)
    if os.environ.get(EXPERTS_VARIABLE) == "1":
        from flashmoe.integrations.vllm.experts import register_experts
        from flashmoe.integrations.vllm.quantised import register_quantised

        register_experts()
        register_quantised()


def _register_attention(registry: Any) -> None:
    backends = registry.AttentionBackendEnum
    custom = backends.CUSTOM
    if not custom.is_overridden():
        registry.register_backend(custom, BACKEND)
    elif custom.get_path() != BACKEND:
        other = f"{custom.get_path()} of another plug-in"
        warnings.warn(f"vLLM's attention backend CUSTOM is {other}; VLLM_PLUGINS says which are loaded", stacklevel=3)
    if hasattr(backends, "register") and NAME not in backends.__members__:  # 0.33 and later take new names
        registry.register_backend(NAME, BACKEND)
