"""The wheel, through hatchling and the hook in hatch_build.py; the same code that `pip wheel .` runs."""

import os
from collections.abc import Mapping
from pathlib import Path

from flashmoe_build.compile.archs import VARIABLES
from flashmoe_build.compile.build import ROOT
from flashmoe_build.compile.toolchain import chosen_platform, is_foreign
from flashmoe_build.release.version import find_commit, project_version

FLOOR = "manylinux_2_28"


def build_folder(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Path:
    """Where a build's files lie. What cannot run on this machine has a folder of its own, beside the library that is loaded here."""
    target = chosen_platform(environ)
    return root / "build" / target if is_foreign(target) else root / "build"


def wheel_tag(environ: Mapping[str, str] = os.environ) -> str:
    return f"py3-none-{FLOOR}_{chosen_platform(environ)}"


def build_wheel(folder: Path, root: Path = ROOT) -> Path:
    """Build the wheel of ``root`` into ``folder``; returns its path. Timestamps in it are the commit's."""
    from hatchling.builders.wheel import WheelBuilder

    os.environ.setdefault("SOURCE_DATE_EPOCH", str(find_commit(root).source_date_epoch))
    project_version(root)  # hatchling would wrap the error for targets that do not exist in one of its own
    folder.mkdir(parents=True, exist_ok=True)
    wheel = Path(next(WheelBuilder(str(root)).build(directory=str(folder), versions=["standard"])))
    for other in folder.glob(
        f"{wheel.name.split('-')[0]}-*.dev0+*.whl"
    ):  # of other commits: one development wheel is enough
        if other != wheel:
            other.unlink()
            print(f"replaced {other.name}, an earlier development wheel")
    return wheel


def build_sdist(folder: Path, root: Path = ROOT) -> Path:
    """Build the source distribution of ``root`` into ``folder``; returns its path."""
    from hatchling.builders.sdist import SdistBuilder

    os.environ.setdefault("SOURCE_DATE_EPOCH", str(find_commit(root).source_date_epoch))
    for variable in VARIABLES:  # sources hold every target
        os.environ.pop(variable, None)
    folder.mkdir(parents=True, exist_ok=True)
    return Path(next(SdistBuilder(str(root)).build(directory=str(folder), versions=["standard"])))
