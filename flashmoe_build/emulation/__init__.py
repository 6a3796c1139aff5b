"""Runs the CUDA kernels on the CPU: the unchanged kernel sources, compiled by g++ against csrc/emulation.

    python -m flashmoe_build.emulation --kernel sm80 --shape b1.h2.kv1.q65.k65.d64 --seeds 8

See docs/emulation.md for what is modelled and what is not.
"""

from importlib import import_module
from pathlib import Path

from flashmoe_tools import operations


def _open_packages() -> None:
    """The operations of an installed wheel have no ``emulation/``: use this checkout's."""
    here = Path(__file__).resolve().parents[2] / "flashmoe_tools" / "operations"
    for name in operations.packages():
        package = import_module(f"{operations.__name__}.{name}")
        if (here / name).is_dir() and str(here / name) not in package.__path__:
            package.__path__.append(str(here / name))


_open_packages()
