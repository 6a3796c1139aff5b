"""``nox -s image``: builds the Dockerfile's images from the checked-out commit."""

import argparse
import os
import re
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmoe._version import __version__
from flashmoe.errors import BuildError
from flashmoe_build.containers.base import BASE_TAG
from flashmoe_build.containers.engine import ca_bundle, engine, require_space
from flashmoe_build.draw import VARIABLE, drawn
from flashmoe_build.program import ROOT, Stopwatch, ending, finish, run
from flashmoe_build.release.version import find_commit
from flashmoe_tools.report import Check, Report, Verdict

TARGETS = {"test": "flashmoe-test", "bench": "flashmoe-bench"}
ENVIRONMENTS = {"test": "build test bench", "bench": "build bench"}  # needed by each target; both share test's layer
PREBUILT = "flashmoe-given:latest"  # the image that holds units compiled by the build outside
REBUILD_EVERY = 8  # one in this many units is compiled again in the image; image_test compares the whole wheel with the one built outside
TIME_LIMIT = 3600  # seconds, for a stage with nothing cached
SPACE = 20e9  # bytes that both images need while they are built: 16 GB of layers, measured, plus headroom
# Settings of this machine's pip, uv and network that a build needs to reach the same packages.
NETWORK_VARIABLES = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)


def network_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in NETWORK_VARIABLES if environment.get(name)}


def drawn_targets(environment: Mapping[str, str]) -> list[str]:
    """One image if ``FLASHMOE_DRAW`` is set, else both."""
    draw = environment.get(VARIABLE)
    return sorted(drawn(TARGETS, len(TARGETS), draw)) if draw else list(TARGETS)


def import_prebuilt(docker: str, cache: Path, draw: str) -> int:
    """Put the entries of ``cache`` into the image ``PREBUILT``, except one in ``REBUILD_EVERY``; returns the number left out."""
    entries = {path for path in cache.glob("??/*.*") if path.is_file()}
    withheld = drawn((path.stem for path in entries), REBUILD_EVERY, draw)
    with tempfile.TemporaryFile() as archive:
        with tarfile.open(fileobj=archive, mode="w") as packed:
            for path in sorted(entries):
                if path.stem not in withheld:
                    entry = packed.gettarinfo(path, str(path.relative_to(cache)))
                    entry.mode = 0o644
                    with path.open("rb") as content:
                        packed.addfile(entry, content)
        archive.seek(0)
        subprocess.run(
            [docker, "import", "-", PREBUILT], stdin=archive, stdout=subprocess.DEVNULL, check=True, timeout=600
        )
    return len(withheld)


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
    given: str = "",
) -> list[str]:
    """The `docker build` call of one target, or of the stage ``toolchain``, which exists only in the engine's cache."""
    commit = find_commit(ROOT)
    arguments = {"FLASHMOE_ARCHS": archs, "ENVIRONMENTS": environments}
    arguments |= {"REVISION": commit.commit, "VERSION": __version__, "SOURCE": _origin()}
    if base is not None:
        arguments |= {"BASE_BUILD": base, "BASE_RUN": base}
    if given:
        arguments["COMPILED"] = given
    command = [docker, "build", "--target", target]
    command += ["--tag", f"{TARGETS[target]}:latest"] if target in TARGETS else ["--output", "type=cacheonly"]
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


def make_context(folder: Path) -> Path:
    """A fresh clone of HEAD: it contains no uncommitted changes, and file modes do not depend on a umask."""
    context = folder / "context"
    command = ["git", "-c", "safe.directory=*", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(context)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, umask=0o022)
    if done.returncode != 0:
        msg = f"images are built from a clone of this checkout, but git clone failed: {done.stderr.strip()[-500:]}"
        raise BuildError(msg)
    return context


def build_images(
    targets: Sequence[str], *, base: str | None, archs: str, cache: Path | None = None, stage: str = ""
) -> Report:
    """Build the targets, or only their stage ``stage``; the report states sizes and seconds."""
    clock = Stopwatch()
    checks: list[Check] = []
    data: dict[str, Any] = {}
    if find_commit(ROOT).dirty:
        print("image    built from HEAD: uncommitted changes are not included", flush=True)
    docker = engine()
    require_space(docker, SPACE)
    if cache is not None:
        data["withheld"] = import_prebuilt(docker, cache, os.environ.get(VARIABLE, ""))
        print(f"image    uses compiled units from {cache}, except {data['withheld']}", flush=True)
    with tempfile.TemporaryDirectory(prefix="flashmoe-image-") as scratch:
        folder = Path(scratch)
        context, secrets, network = make_context(folder), _secrets(folder), _network(os.environ)
        for target in [stage] if stage else targets:
            begun = time.monotonic()
            command = build_command(
                docker, target, context, base=base, archs=archs, secrets=secrets, network=network,
                environments=ENVIRONMENTS["test" if "test" in targets else "bench"], given=PREBUILT if cache else "",
            )  # fmt: skip
            run(command, f"image {target}", time_limit=TIME_LIMIT, cwd=ROOT)
            if stage:
                checks.append(Check(f"stage {stage}", Verdict.PASS, found=f"{time.monotonic() - begun:.0f} s"))
                continue
            tag = f"{TARGETS[target]}:latest"
            size = int(subprocess.check_output([docker, "image", "inspect", "-f", "{{.Size}}", tag], text=True))
            seconds = round(time.monotonic() - begun, 1)
            data[target] = {"bytes": size, "seconds": seconds}
            checks.append(Check(f"image {target}", Verdict.PASS, found=f"{size / 1e9:.2f} GB in {seconds:.0f} s"))
            print(f"image    {tag} {size / 1e9:.2f} GB, {seconds:.0f} s", flush=True)
    data["archs"] = archs
    data["base"] = base or "pinned digests"
    return clock.report("image", checks, data)


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
    """The requested network; by default the host's if an index or a proxy runs on the host."""
    chosen = environment.get("FLASHMOE_DOCKER_NETWORK", "")
    local = any(re.search(r"//(localhost|127\.)", value) for value in network_settings(environment).values())
    return chosen or ("host" if local else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_build.containers.image", description=__doc__
    )
    parser.add_argument(
        "targets", nargs="*", choices=[*TARGETS, []], default=[], help="default: both; one, if FLASHMOE_DRAW is set"
    )
    parser.add_argument(
        "--base", help=f"base image for every stage (for example {BASE_TAG}); default: the pinned digests"
    )
    parser.add_argument("--archs", default=os.environ.get("FLASHMOE_ARCHS", "all"))
    parser.add_argument(
        "--given", type=Path, metavar="CACHE", help="a build's cache; only a sample of its units is compiled again"
    )
    parser.add_argument(
        "--environments", dest="stage", action="store_const", const="toolchain", default="",
        help="build only the locked environments, which a later call finds in the engine's cache",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    targets = options.targets or drawn_targets(os.environ)
    return ending(
        lambda: finish(
            build_images(targets, base=options.base, archs=options.archs, cache=options.given, stage=options.stage)
        ),
        "no image was built",
    )


if __name__ == "__main__":
    raise SystemExit(main())
