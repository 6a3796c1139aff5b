"""Other libraries' function names on flashmoe's kernels, for code that imports them."""

from __future__ import annotations

from flashmoe.compat.install import install_as_flash_attn, install_as_flash_attn_3, uninstall_flash_attn

__all__ = ["install_as_flash_attn", "install_as_flash_attn_3", "uninstall_flash_attn"]
