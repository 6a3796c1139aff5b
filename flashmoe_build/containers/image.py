"""``nox -s image``: builds the Dockerfile's images from the checked-out commit."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmoe._version import __version__
from flashmoe.errors import BuildError, ExitCode, FlashmoeError
from flashmoe_build.containers.base import BASE_TAG
from flashmoe_build.containers.engine import OutOfReachError, ca_bundle, engine, require_space, run
from flashmoe_build.release.version import find_commit
from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now, write_report

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"test": "flashmoe-test", "bench": "flashmoe-bench"}
ENVIRONMENTS = {"test": "build test bench", "bench": "build bench"}  # that a target needs; test's layer serves both
TIME_LIMIT = 3600  # seconds, a stage with nothing cached
SPACE = 20e9  # bytes that both images need while they are built: 16 GB of layers, measured, plus headroom
# Settings of this machine's pip, uv and network that a build needs to reach the same packages.
NETWORK_VARIABLES = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
STEP = re.compile(r"^#(\d+) \[(?:([a-z_]+) )?.*\d+/\d+\]", re.MULTILINE)
DONE = re.compile(r"^#(\d+) DONE ([\d.]+)s", re.MULTILINE)
EXPORT = re.compile(r"^#(\d+) exporting to image", re.MULTILINE)


def network_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in NETWORK_VARIABLES if environment.get(name)}


def build_command(
    docker: str,
    target: str,
    context: Path,
    *,
    base: str | None,
    archs: str,
    secrets: Mapping[str, Path],
    network: str,
    environments: str = ENVIRONMENTS["test"],
) -> list[str]:
    """The `docker build` call of one target."""
    commit = find_commit(ROOT)
    arguments = {"FLASHMOE_ARCHS": archs, "ENVIRONMENTS": environments}
    arguments |= {"REVISION": commit.commit, "VERSION": __version__, "SOURCE": _origin()}
    if base is not None:
        arguments |= {"BASE_BUILD": base, "BASE_RUN": base}
    command = [docker, "build", "--target", target, "--tag", f"{TARGETS[target]}:latest"]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    for name, path in secrets.items():
        command += ["--secret", f"id={name},src={path}"]
    if network:
        command += ["--network", network]
    return [*command, str(context)]


def _origin() -> str:
    done = subprocess.run(
        ["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    return done.stdout.strip() if done.returncode == 0 and "://" in done.stdout else "unknown"


def stage_seconds(log: str) -> dict[str, float]:
    """Seconds of each stage's own steps, and of the export, from BuildKit's plain log. Stages may run concurrently."""
    stages = {number: stage or "base" for number, stage in STEP.findall(log)}
    stages |= dict.fromkeys(EXPORT.findall(log), "export")
    seconds: dict[str, float] = {}
    for number, spent in DONE.findall(log):
        if number in stages:
            seconds[stages[number]] = round(seconds.get(stages[number], 0.0) + float(spent), 1)
    return seconds


def make_context(folder: Path) -> Path:
    """A fresh clone of HEAD: uncommitted changes cannot get in, and file modes do not depend on a umask."""
    context = folder / "context"
    command = ["git", "-c", "safe.directory=*", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(context)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, umask=0o022)
    if done.returncode != 0:
        msg = f"images are built from a clone of this checkout, but git clone failed: {done.stderr.strip()[-500:]}"
        raise BuildError(msg)
    return context


def layers(docker: str, tag: str) -> list[dict[str, Any]]:
    """[{bytes, step}] of an image's layers over 1 MB, largest first."""
    command = [docker, "history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", tag]
    rows = subprocess.check_output(command, text=True, timeout=60).splitlines()
    found = [(int(size), step) for size, step in (row.split("\t", 1) for row in rows)]
    return [{"bytes": size, "step": step[:160]} for size, step in sorted(found, reverse=True) if size > 1_000_000]


def build_images(targets: Sequence[str], *, base: str | None, archs: str) -> Report:
    """Build the targets; the report states sizes by layer and seconds by stage."""
    started, clock = utc_now(), time.monotonic()
    checks: list[Check] = []
    data: dict[str, Any] = {}
    if find_commit(ROOT).dirty:
        print("image    built from HEAD: uncommitted changes are not included", flush=True)
    with engine(ROOT / "build" / "docker") as docker, tempfile.TemporaryDirectory(prefix="flashmoe-image-") as scratch:
        require_space(docker, SPACE)
        folder = Path(scratch)
        context, secrets, network = make_context(folder), _secrets(folder), _network(os.environ)
        for target in targets:
            begun = time.monotonic()
            command = build_command(
                docker, target, context, base=base, archs=archs, secrets=secrets, network=network,
                environments=ENVIRONMENTS["test" if "test" in targets else target],
            )  # fmt: skip
            log = run(command, f"image {target}", time_limit=TIME_LIMIT, cwd=ROOT)
            tag = f"{TARGETS[target]}:latest"
            size = int(subprocess.check_output([docker, "image", "inspect", "-f", "{{.Size}}", tag], text=True))
            seconds = round(time.monotonic() - begun, 1)
            stages = stage_seconds(log)
            data[target] = {"bytes": size, "seconds": seconds, "stages": stages, "layers": layers(docker, tag)}
            checks.append(Check(f"image {target}", Verdict.PASS, found=f"{size / 1e9:.2f} GB in {seconds:.0f} s"))
            spent = ", ".join(f"{stage} {value:.0f} s" for stage, value in stages.items())
            print(f"image    {tag} {size / 1e9:.2f} GB, {seconds:.0f} s ({spent})", flush=True)
    data["archs"] = archs
    data["base"] = base or "pinned digests"
    return Report(
        "image", tuple(checks), data, host_environment(), tuple(sys.argv[1:]), started, time.monotonic() - clock
    )


def _secrets(folder: Path) -> dict[str, Path]:
    secrets = {}
    ca = ca_bundle(os.environ)
    if ca is not None:
        secrets["ca"] = ca
    settings = network_settings(os.environ)
    if settings:
        secrets["index"] = folder / "index"
        secrets["index"].touch(mode=0o600)
        secrets["index"].write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="utf-8")
    return secrets


def _network(environment: Mapping[str, str]) -> str:
    """The requested network; by default the host's if an index or a proxy is on the host itself."""
    chosen = environment.get("FLASHMOE_DOCKER_NETWORK", "")
    local = any(re.search(r"//(localhost|127\.)", value) for value in network_settings(environment).values())
    return chosen or ("host" if local else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flashmoe_build.containers.image", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], default=[], help="default: all")
    parser.add_argument(
        "--base", help=f"base image for every stage (for example {BASE_TAG}); default: the pinned digests"
    )
    parser.add_argument("--archs", default=os.environ.get("FLASHMOE_ARCHS", "all"))
    options = parser.parse_args(arguments)
    try:
        report = build_images(options.targets or list(TARGETS), base=options.base, archs=options.archs)
    except OutOfReachError as error:
        print(f"no image was built: {error}", file=sys.stderr)
        return ExitCode.NOTHING_CHECKED
    except FlashmoeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.FAILED
    write_report(ROOT / "build" / "reports" / "image.json", report)
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
