"""This machine's Docker engine: its client, its disk, and the network settings that a build needs."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from flashmoe_build.program import OutOfReachError

CA_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def docker_program() -> str:
    """The docker client; raises OutOfReachError that says how to get one."""
    for candidate in ("/usr/bin/docker", shutil.which("docker") or ""):  # a distribution's client matches its daemon
        if candidate and Path(candidate).exists():
            return candidate
    msg = "no docker client; install one (Debian: apt-get install docker.io) and run the session again"
    raise OutOfReachError(msg)


def engine() -> str:
    """The docker client of a running engine. Raises OutOfReachError if none answers."""
    docker = docker_program()
    if not _info(docker, "{{.ServerVersion}}"):
        msg = (
            "no Docker engine answers; start one (systemctl start docker), or let .ci/images start and end one as root"
        )
        raise OutOfReachError(msg)
    return docker


def _info(docker: str, template: str) -> str:
    done = subprocess.run(
        [docker, "info", "--format", template], capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout.strip()


def require_space(docker: str, needed: float) -> None:
    """Raise OutOfReachError if the engine's disk has less than ``needed`` bytes free (if it is a disk of this machine)."""
    root = Path(_info(docker, "{{.DockerRootDir}}") or "/nonexistent")
    if root.is_dir() and shutil.disk_usage(root).free < needed:
        msg = (
            f"the images need {needed / 1e9:.0f} GB of disk while they are built, "
            f"and {shutil.disk_usage(root).free / 1e9:.0f} GB are free; make room (docker system prune)"
        )
        raise OutOfReachError(msg)


def ca_bundle(environment: Mapping[str, str]) -> Path | None:
    """The certificate bundle that this machine's clients use, to be passed into builds as a secret."""
    for variable in CA_VARIABLES:
        path = Path(environment.get(variable, ""))
        if environment.get(variable) and path.is_file():
            return path
    return None
