"""Runs the package ring-flash-attn, which imports flash_attn, on our functions through flashmoe.compat."""

import importlib
import sys
from types import ModuleType
from typing import Any

from flashmoe.compat import install_as_flash_attn

PACKAGE = "ring_flash_attn"
_ADAPTERS = f"{PACKAGE}.adapters"


def load() -> Any:
    """Imports the package. Raises ImportError if it is not installed, ArgumentError if flash_attn itself is.

    Like flash_attn, its functions need 16-bit inputs: with float32 nothing is converted, so its buffers would be its
    sums.
    """
    install_as_flash_attn()
    if PACKAGE not in sys.modules:
        # Its adapter for transformers imports names that transformers 5 no longer has. Nothing here needs it.
        adapters = ModuleType(_ADAPTERS)
        adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
        sys.modules.setdefault(_ADAPTERS, adapters)
    return importlib.import_module(PACKAGE)
