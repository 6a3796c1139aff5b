"""Whether another package provides our import name: the index has others that install a folder `flashmoe`."""

import sys
from importlib import metadata

from flashmoe._version import DISTRIBUTION, __version__
from flashmoe_tools.report import Check, Verdict

STRANGERS = ("flashmoe", "flashmoe-py")
UNDO = f"pip uninstall {' '.join(STRANGERS)}; pip install --force-reinstall --no-deps {DISTRIBUTION}"


def find_shadows() -> tuple[str, ...]:
    """What is installed under our name, in words: other distributions, or a package file that is not ours."""
    found = dict.fromkeys(
        f"{item.name} {item.version}" for name in STRANGERS for item in metadata.distributions(name=name)
    )
    if (
        getattr(sys.modules.get("flashmoe"), "__version__", None) != __version__
    ):  # overwritten, or removed by an uninstall
        found["a flashmoe/__init__.py that is not ours, or none"] = None
    return tuple(found)


def shadow(shadows: tuple[str, ...]) -> Check:
    expected = f"`import flashmoe` is {DISTRIBUTION}"
    if not shadows:
        return Check("name", Verdict.PASS, f"{DISTRIBUTION} {__version__}", expected)
    why = (
        f"it installs into the same folder flashmoe/; `pip install flashmoe` is another project, ours is {DISTRIBUTION}"
    )
    return Check("name", Verdict.FAIL, ", ".join(shadows), expected, why, UNDO)
