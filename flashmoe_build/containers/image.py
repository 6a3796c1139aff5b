"""``nox -s image``: builds the images of the Dockerfile from this checkout."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flashmoe._version import __version__
from flashmoe.errors import ExitCode, FlashmoeError
from flashmoe.report import Check, Report, Verdict, host_environment, utc_now, write_report
from flashmoe_build.containers.base import BASE_TAG
from flashmoe_build.containers.engine import ca_bundle, engine, run
from flashmoe_build.provenance import find_commit

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"test": "flashmoe-test", "bench": "flashmoe-bench"}
TIME_LIMIT = 3600  # seconds, a stage with nothing cached


def build_command(docker: str, target: str, *, base: str | None, archs: str, ca: Path | None) -> list[str]:
    """The `docker build` call of one target."""
    commit = find_commit(ROOT)
    arguments = {"FLASHMOE_ARCHS": archs, "REVISION": commit.commit, "VERSION": __version__, "SOURCE": _origin()}
    if base is not None:
        arguments |= {"BASE_BUILD": base, "BASE_RUN": base}
    command = [docker, "build", "--target", target, "--tag", f"{TARGETS[target]}:latest"]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    if ca is not None:
        command += ["--secret", f"id=ca,src={ca}"]
    if os.environ.get("FLASHMOE_DOCKER_NETWORK"):
        command += ["--network", os.environ["FLASHMOE_DOCKER_NETWORK"]]
    return [*command, str(ROOT)]


def _origin() -> str:
    done = subprocess.run(
        ["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    return done.stdout.strip() if done.returncode == 0 and "://" in done.stdout else "unknown"


def build_images(targets: Sequence[str], *, base: str | None, archs: str) -> Report:
    """Build the targets; the report states each image's size and the seconds it took."""
    started, clock = utc_now(), time.monotonic()
    checks, data = [], {}
    with engine(ROOT / "build" / "docker") as docker:
        for target in targets:
            begun = time.monotonic()
            command = build_command(docker, target, base=base, archs=archs, ca=ca_bundle(os.environ))
            run(command, f"image {target}", time_limit=TIME_LIMIT, cwd=ROOT)
            tag = f"{TARGETS[target]}:latest"
            size = int(subprocess.check_output([docker, "image", "inspect", "-f", "{{.Size}}", tag], text=True))
            seconds = round(time.monotonic() - begun, 1)
            data[target] = {"tag": tag, "bytes": size, "seconds": seconds}
            checks.append(Check(f"image {target}", Verdict.PASS, found=f"{size / 1e9:.2f} GB in {seconds:.0f} s"))
            print(f"image    {tag} {size / 1e9:.2f} GB, {seconds:.0f} s", flush=True)
    return Report(
        "image", tuple(checks), data, host_environment(), tuple(sys.argv[1:]), started, time.monotonic() - clock
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flashmoe_build.containers.image", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], default=list(TARGETS), help="default: all")
    parser.add_argument(
        "--base", help=f"base image for every stage (for example {BASE_TAG}); default: the pinned digests"
    )
    parser.add_argument("--archs", default=os.environ.get("FLASHMOE_ARCHS", "all"))
    options = parser.parse_args(arguments)
    try:
        report = build_images(options.targets, base=options.base, archs=options.archs)
    except FlashmoeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.FAILED
    write_report(ROOT / "build" / "reports" / "image.json", report)
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
