"""Puts flashmoe's functions under the module names of the flash_attn package."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from flashmoe.errors import ArgumentError

# The version of flash_attn whose documented interface is followed, for code that compares versions.
INTERFACE_VERSION = "2.8.3"
_PACKAGE = "flash_attn"
_MARK = "__flashmoe__"


def install_as_flash_attn() -> None:
    """From now on ``import flash_attn`` gives :mod:`flashmoe.compat.flash_attn`, with its ``flash_attn_interface`` and ``bert_padding``.

    A second call changes nothing. Raises ArgumentError where the real package is installed or already imported: this is no way
    to replace it unseen.
    """
    present = sys.modules.get(_PACKAGE)
    if present is not None and hasattr(present, _MARK):
        return
    if present is not None or importlib.util.find_spec(_PACKAGE) is not None:
        msg = (
            "the package flash_attn is installed; uninstall it first (pip uninstall flash-attn), or import the functions from "
            "flashmoe.compat.flash_attn"
        )
        raise ArgumentError(msg)
    from flashmoe.compat import bert_padding, flash_attn

    package = ModuleType(_PACKAGE, f"flashmoe under flash_attn's names (interface of {INTERFACE_VERSION}).")
    package.__path__ = []
    package.__spec__ = ModuleSpec(_PACKAGE, None, is_package=True)  # find_spec raises for a module without one
    package.__version__ = INTERFACE_VERSION  # type: ignore[attr-defined]
    setattr(package, _MARK, True)
    for name in flash_attn.__all__:
        setattr(package, name, getattr(flash_attn, name))
    package.flash_attn_interface = flash_attn  # type: ignore[attr-defined]
    package.bert_padding = bert_padding  # type: ignore[attr-defined]
    sys.modules[_PACKAGE] = package
    sys.modules[f"{_PACKAGE}.flash_attn_interface"] = flash_attn
    sys.modules[f"{_PACKAGE}.bert_padding"] = bert_padding


def uninstall_flash_attn() -> None:
    """Undo :func:`install_as_flash_attn`; what was imported meanwhile keeps its functions."""
    present = sys.modules.get(_PACKAGE)
    if present is None or not hasattr(present, _MARK):
        return
    for name in (_PACKAGE, f"{_PACKAGE}.flash_attn_interface", f"{_PACKAGE}.bert_padding"):
        sys.modules.pop(name, None)
