"""Builds the wheel, through hatchling and the hook in hatch_build.py, as `pip wheel .` does."""

import os
from collections.abc import Mapping
from pathlib import Path

from flashmoe_build.compile.archs import VARIABLES
from flashmoe_build.compile.build import ROOT
from flashmoe_build.compile.toolchain import chosen_platform, is_foreign
from flashmoe_build.release.version import find_commit, project_version

FLOOR = "manylinux_2_28"


def build_folder(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of a build's files. Builds for a platform that cannot run here are kept apart from the library that is loaded here."""
    target = chosen_platform(environ)
    return root / "build" / target if is_foreign(target) else root / "build"


def wheel_tag(environ: Mapping[str, str] = os.environ) -> str:
    return f"py3-none-{FLOOR}_{chosen_platform(environ)}"


def build_wheel(folder: Path, root: Path = ROOT) -> Path:
    """Build the wheel of ``root`` into ``folder``; returns its path. Its timestamps are the commit's."""
    from hatchling.builders.wheel import WheelBuilder

    os.environ.setdefault("SOURCE_DATE_EPOCH", str(find_commit(root).source_date_epoch))
    project_version(root)  # checked first, because hatchling would wrap the error for unknown targets
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
    for variable in VARIABLES:  # an sdist contains every target
        os.environ.pop(variable, None)
    folder.mkdir(parents=True, exist_ok=True)
    return Path(next(SdistBuilder(str(root)).build(directory=str(folder), versions=["standard"])))
