"""The error for importing a part of flash_attn that flashmoe does not have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_ADVICE = {
    "flash_attn_interface": "FlashAttention 3's module; install_as_flash_attn_3() provides it",
    "flash_attn.layers": "there is layers.rotary; for the others use torch.nn",
    "flash_attn.losses": "use torch.nn.functional.cross_entropy",
    "flash_attn.modules": "use flashmoe.Attention, or a model of transformers with flashmoe.integrations.transformers.register()",
    "flash_attn.models": "use a model of transformers with flashmoe.integrations.transformers.register()",
    "flash_attn.ops": "use torch's own: torch.nn.functional.rms_norm, layer_norm, silu",
}
_MARK = "__flashmoe__"


class MissingParts:
    """The last finder of ``sys.meta_path``: explains an import that no other finder resolved. A mere lookup (find_spec) gets None."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = name.partition(".")[0]
        is_import = sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"  # not importlib.util.find_spec
        if not is_import or not (name in _ADVICE or top == "flash_attn"):
            return None
        if not hasattr(sys.modules.get("flash_attn"), _MARK):
            return None
        advice = next((text for known, text in _ADVICE.items() if f"{name}.".startswith(f"{known}.")), "")
        version = " (flash_attn 2.8's interface)" if top == "flash_attn" else ""
        words = f": {advice}" if advice else ""
        msg = f"flashmoe.compat has no {name}{version}{words}; docs/guides/from-flash-attn.md lists what is supported"
        raise ModuleNotFoundError(msg, name=name)


FINDER = MissingParts()


def explain_missing(is_wanted: bool = True) -> None:
    """Install the finder, or remove it."""
    if is_wanted and FINDER not in sys.meta_path:
        sys.meta_path.append(FINDER)
    if not is_wanted and FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
