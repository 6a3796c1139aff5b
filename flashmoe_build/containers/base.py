"""``nox -s base_image``: a base image from Debian packages, for machines without access to a registry.

debootstrap checks the archive's signature against Debian's keyring and every package against the signed index. The
installed versions are then compared with lockfiles/debian-bookworm.pins: any difference is an error that names the package.
"""

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashmoe.errors import BuildError
from flashmoe_build.containers.engine import engine
from flashmoe_build.program import ROOT, OutOfReachError, Stopwatch, ending, finish, run
from flashmoe_tools.report import Check, Report, Verdict

SUITE = "bookworm"
PINS = ROOT / "lockfiles" / f"debian-{SUITE}.pins"
PACKAGES = ("python3", "python3-venv", "g++", "git", "ca-certificates", "binutils")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
BASE_TAG = f"flashmoe-base:{SUITE}"
TIME_LIMIT = 1200  # seconds
# Files that depend on this machine or the time: Docker sets each container's host name and resolver; the rest are logs and caches.
EXCLUDED = ("./proc/*", "./sys/*", "./dev/*", "./etc/hostname", "./etc/resolv.conf", "./etc/machine-id", "./var/log/*",
            "./var/cache/*", "./tmp/*", "*.pyc")  # fmt: skip
EPOCH = "1686355200"  # SOURCE_DATE_EPOCH of account files: bookworm's release


def parse_pins(text: str) -> dict[str, str]:
    """{package: version} from lines ``name=version``; comments and empty lines are ignored."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def differences(pinned: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """One line for every package whose version is not the pinned one."""
    result = []
    for name in sorted({*pinned, *found}):
        if pinned.get(name) != found.get(name):
            result.append(f"{name}: pinned {pinned.get(name, 'not at all')}, found {found.get(name, 'not installed')}")
    return result


def require_pinned(found: Mapping[str, str]) -> None:
    """Raise BuildError unless these are the versions of lockfiles/debian-bookworm.pins."""
    changed = differences(parse_pins(PINS.read_text(encoding="utf-8")), found)
    if changed:
        listed = "\n  ".join(changed)
        msg = f"the archive has other versions than lockfiles/debian-bookworm.pins:\n  {listed}\nreview them, then run `nox -s base_image -- --update`"
        raise BuildError(msg)


def judged(output: str) -> BuildError:
    """debootstrap's failure as an error: an unreachable archive is NOT RUN (OutOfReachError), a bad signature is a failure."""
    if re.search(r"Couldn't download|Failed getting release|Could not connect", output):
        last = next((line for line in reversed(output.splitlines()) if line.startswith("E:")), output[-300:])
        return OutOfReachError(
            f"the Debian archive cannot be reached ({last.strip()}); set FLASHMOE_DEBIAN_MIRROR to one that can"
        )
    return BuildError(output)


def bootstrap(folder: Path, *, suite: str = SUITE, packages: Sequence[str] = PACKAGES, arch: str = "") -> None:
    """Unpack and configure the packages in ``folder``; needs root. Packages of another ``arch`` are only unpacked: none of their code runs."""
    if os.geteuid() != 0:
        msg = "unpacking a base needs root (debootstrap makes devices and users); run this session as root"
        raise OutOfReachError(msg)
    if shutil.which("debootstrap") is None or not KEYRING.is_file():
        msg = "debootstrap or Debian's keyring is missing; apt-get install debootstrap debian-archive-keyring"
        raise OutOfReachError(msg)
    command = ["debootstrap", "--variant=minbase", f"--keyring={KEYRING}", "--force-check-gpg"]
    command += ["--foreign", f"--arch={arch}"] if arch else []
    command += [f"--include={','.join(packages)}", suite, str(folder)]
    command += [os.environ["FLASHMOE_DEBIAN_MIRROR"]] if os.environ.get("FLASHMOE_DEBIAN_MIRROR") else []
    try:
        # unsafe-io: no fsync per unpacked file, because the folder is packed and then deleted
        environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "DPKG_FORCE": "unsafe-io"}
        run(command, "debootstrap", time_limit=TIME_LIMIT, environment=environment)
    except BuildError as error:
        raise judged(str(error)) from error
    archives = folder / "var" / "cache" / "apt" / "archives"
    for package in sorted(archives.glob("*.deb")) if arch else ():
        subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True, timeout=120)
    shutil.rmtree(archives, ignore_errors=True)
    shutil.rmtree(folder / "var" / "lib" / "apt" / "lists", ignore_errors=True)


def installed(folder: Path) -> dict[str, str]:
    command = ["chroot", str(folder), "dpkg-query", "-W", "-f", "${Package}=${Version}\n"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return parse_pins(done.stdout)


def make(*, update: bool) -> Report:
    """Make the base image and tag it; with ``update`` write the pins instead of checking them."""
    clock = Stopwatch()
    docker = engine()
    with tempfile.TemporaryDirectory(prefix="flashmoe-base-") as temporary:
        folder = Path(temporary) / "root"
        bootstrap(folder)
        found = installed(folder)
        if update:
            header = (
                f"# What `nox -s base_image` installs (Debian {SUITE}); rewritten by `nox -s base_image -- --update`.\n"
            )
            PINS.write_text(header + "".join(f"{n}={v}\n" for n, v in sorted(found.items())), encoding="utf-8")
            print(f"wrote    {PINS.name}, {len(found)} packages")
        else:
            require_pinned(found)
        digest = _import(docker, folder)
    check = Check(
        "base image", Verdict.PASS, f"{len(found)} packages, {digest}", "the versions of lockfiles/debian-bookworm.pins"
    )
    return clock.report("base_image", [check], {"tag": BASE_TAG, "layer": digest, "packages": len(found)})


def _import(docker: str, folder: Path) -> str:
    """The layer's digest. Its files carry no times and nothing from this machine, so the same packages give the same layer. An
    existing image with this layer is kept, so that whatever was built on it stays in the engine's cache.
    """
    archive = folder.with_suffix(".tar")
    tar = ["tar", "--sort=name", "--mtime=@0", "--numeric-owner", *(f"--exclude={name}" for name in EXCLUDED)]
    run([*tar, "-C", str(folder), "-cf", str(archive), "."], "packing the base", time_limit=TIME_LIMIT)
    done = subprocess.run(["sha256sum", str(archive)], capture_output=True, text=True, check=True, timeout=TIME_LIMIT)
    digest = f"sha256:{done.stdout.split()[0]}"
    inspect = [docker, "image", "inspect", "-f", "{{index .RootFS.Layers 0}}", BASE_TAG]
    known = subprocess.run(inspect, capture_output=True, text=True, check=False, timeout=60)
    if known.returncode == 0 and known.stdout.strip() == digest:
        print(f"image    {BASE_TAG} already has this layer, {digest}", flush=True)
        return digest
    run([docker, "import", str(archive), BASE_TAG], "docker import", time_limit=TIME_LIMIT)
    print(f"image    {BASE_TAG} {digest}", flush=True)
    return digest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_build.containers.base", description=__doc__
    )
    parser.add_argument(
        "--update", action="store_true", help="write lockfiles/debian-bookworm.pins from the archive's current versions"
    )
    options = parser.parse_args(arguments)
    return ending(lambda: finish(make(update=options.update)), "no base image was made")


if __name__ == "__main__":
    raise SystemExit(main())
