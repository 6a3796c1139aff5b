"""Puts flashmoe's functions under the module names of the flash_attn package."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from flashmoe.compat.missing import explain_missing
from flashmoe.errors import ArgumentError

# The version of flash_attn whose documented interface is followed, for code that compares versions.
INTERFACE_VERSION = "2.8.3"
_PACKAGE = "flash_attn"
_MODULES = (
    *(_PACKAGE, f"{_PACKAGE}.flash_attn_interface", f"{_PACKAGE}.bert_padding", f"{_PACKAGE}.layers"),
    *(f"{_PACKAGE}.layers.rotary", "flash_attn_2_cuda"),
)
_MODULE_3 = "flash_attn_interface"
_MARK = "__flashmoe__"


def install_as_flash_attn() -> None:
    """Make ``import flash_attn`` return :mod:`flashmoe.compat.flash_attn`, with its ``flash_attn_interface``,
    ``bert_padding`` and ``layers.rotary``; ``flash_attn_2_cuda`` becomes :mod:`flashmoe.compat.flash_attn_gpu`.

    A second call changes nothing. Raises ArgumentError if the real package is installed or already imported, so that it is never
    replaced silently.
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
    from flashmoe.compat import bert_padding, flash_attn, flash_attn_gpu, rotary

    package = _package(_PACKAGE)
    package.__file__ = flash_attn.__file__  # shown by Python when an import finds no such function
    for name in flash_attn.__all__:
        setattr(package, name, getattr(flash_attn, name))
    layers = _package(f"{_PACKAGE}.layers")
    package.flash_attn_interface, package.bert_padding, package.layers = flash_attn, bert_padding, layers  # type: ignore[attr-defined]
    layers.rotary = rotary  # type: ignore[attr-defined]
    modules = (package, flash_attn, bert_padding, layers, rotary, flash_attn_gpu)
    sys.modules.update(zip(_MODULES, modules, strict=True))
    explain_missing()


def install_as_flash_attn_3() -> None:
    """The same for ``import flash_attn_interface``, FlashAttention 3's module, which returns :mod:`flashmoe.compat.flash_attn_3`, and for its
    operators, ``torch.ops.flash_attn_3``."""
    from flashmoe.compat import flash_attn_3, flash_attn_3_operators

    present = sys.modules.get(_MODULE_3)
    if present is flash_attn_3:
        return
    if present is not None or importlib.util.find_spec(_MODULE_3) is not None:
        msg = f"the module {_MODULE_3} is installed; uninstall it first, or import the functions from flashmoe.compat.flash_attn_3"
        raise ArgumentError(msg)
    sys.modules[_MODULE_3] = flash_attn_3
    flash_attn_3_operators.register()


def uninstall_flash_attn() -> None:
    """Undo both; modules imported in the meantime keep their functions."""
    if sys.modules.pop(_MODULE_3, None) is not None:
        from flashmoe.compat import flash_attn_3_operators

        flash_attn_3_operators.unregister()
    explain_missing(is_wanted=False)
    if hasattr(sys.modules.get(_PACKAGE), _MARK):
        for name in _MODULES:
            sys.modules.pop(name, None)


def _package(name: str) -> ModuleType:
    package = ModuleType(name, f"flashmoe under flash_attn's names (interface of {INTERFACE_VERSION}).")
    package.__path__ = []
    package.__spec__ = ModuleSpec(name, None, is_package=True)  # find_spec raises for a module without one
    package.__version__ = INTERFACE_VERSION  # type: ignore[attr-defined]
    setattr(package, _MARK, True)
    return package
