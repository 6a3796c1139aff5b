"""``python -m flashmoe_build``: build the library and the wheel."""

import argparse
import os
import sys
from pathlib import Path

from flashmoe.errors import ExitCode, FlashmoeError, explain_os_error
from flashmoe_build.compile.build import ROOT, build
from flashmoe_build.compile.toolchain import PLATFORM_VARIABLE, PLATFORMS
from flashmoe_build.release.wheel import build_folder, build_sdist, build_wheel
from flashmoe_tools.streams import prepare_streams


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flashmoe_build", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--archs", help="all, native, none, or a list such as 90a,80 (default: FLASHMOE_ARCHS, FA_ARCHS, all)"
    )
    parser.add_argument(
        "--platform", choices=PLATFORMS, help="the platform of the host code (default: FLASHMOE_PLATFORM, this machine)"
    )
    parser.add_argument("--library-only", action="store_true", help="stop after build/lib/libflashmoe.so")
    parser.add_argument(
        "--out", type=Path, help="folder for the library and reports (with --library-only; default: build)"
    )
    parser.add_argument("--sdist", action="store_true", help="make the source distribution only")
    parser.add_argument(
        "--dist", type=Path, help="folder for the wheel (default: dist; dist/PLATFORM for another machine)"
    )
    prepare_streams()
    arguments = parser.parse_args()
    if arguments.archs:
        os.environ["FLASHMOE_ARCHS"] = arguments.archs
    if arguments.platform:
        os.environ[PLATFORM_VARIABLE] = arguments.platform
    try:
        if arguments.sdist:
            print(f"sdist    {build_sdist(arguments.dist or ROOT / 'dist').name}")
        elif arguments.library_only:
            build(arguments.out or build_folder())
        else:
            wheel = build_wheel(arguments.dist or ROOT / "dist" / build_folder().relative_to(ROOT / "build"))
            print(f"wheel    {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
    except FlashmoeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        print("interrupted; the next build continues from what was compiled", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except OSError as error:
        reason = explain_os_error(error)
        if reason is None:
            raise
        print(f"the build stopped: {reason}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.OK


if __name__ == "__main__":
    raise SystemExit(main())
