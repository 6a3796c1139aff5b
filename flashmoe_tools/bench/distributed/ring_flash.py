"""The package ring-flash-attn on our functions: it imports flash_attn, whose names flashmoe.compat gives."""

import importlib
import sys
from types import ModuleType
from typing import Any

from flashmoe.compat import install_as_flash_attn

PACKAGE = "ring_flash_attn"
_ADAPTERS = f"{PACKAGE}.adapters"


def load() -> Any:
    """The package. Raises ImportError where it is not installed, ArgumentError where flash_attn itself is.

    Its functions want 16 bits, as flash_attn does: with float32, where nothing is converted, its buffers would be its sums, too.
    """
    install_as_flash_attn()
    if PACKAGE not in sys.modules:
        # Its adapter for transformers imports what transformers 5 no longer has. Nothing here needs it.
        adapters = ModuleType(_ADAPTERS)
        adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
        sys.modules.setdefault(_ADAPTERS, adapters)
    return importlib.import_module(PACKAGE)
