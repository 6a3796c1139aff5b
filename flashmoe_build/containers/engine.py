"""The Docker engine: the running one, or one started here on machines (CI) that have dockerd but no running daemon."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flashmoe_build.program import OutOfReachError

START_TIME_LIMIT = 60  # seconds
CA_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def docker_program() -> str:
    """The docker client; raises OutOfReachError with how to get one."""
    for candidate in ("/usr/bin/docker", shutil.which("docker") or ""):  # a distribution's client matches its daemon
        if candidate and Path(candidate).exists():
            return candidate
    msg = "no docker client; install one (Debian: apt-get install docker.io) and run the session again"
    raise OutOfReachError(msg)


def is_running(docker: str) -> bool:
    done = subprocess.run(
        [docker, "version", "--format", "{{.Server.Version}}"], capture_output=True, check=False, timeout=60
    )
    return done.returncode == 0


@contextmanager
def engine(folder: Path) -> Iterator[str]:
    """Yields the docker client of a running daemon; a daemon started here is stopped afterwards, by its pid."""
    docker = docker_program()
    if is_running(docker):
        yield docker
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        msg = (
            "no Docker engine answers, and none can be started here (that needs root and dockerd); "
            "start one (systemctl start docker), or run as root with Debian's docker.io installed"
        )
        raise OutOfReachError(msg)
    runtime = tempfile.mkdtemp(
        prefix="flashmoe-dockerd-"
    )  # short, because socket paths may have at most 107 characters
    process, log = _start(folder, Path(runtime))
    try:
        _wait_until_running(docker, process, log)
        _refuse_copying_driver(docker)
        probe(docker)
        yield docker
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
        shutil.rmtree(runtime, ignore_errors=True)
        release_mounts(folder)


def mounts_below(folder: Path, mountinfo: str) -> list[str]:
    """Mount points in ``folder`` in the order in which to unmount them, from the text of /proc/self/mountinfo."""
    points = [line.split()[4].replace("\\040", " ") for line in mountinfo.splitlines()]
    return sorted((point for point in points if Path(point).is_relative_to(folder)), key=len, reverse=True)


def release_mounts(folder: Path) -> None:
    """Unmount what a daemon left: where the root is a shared mount it mounts its own data folder, which then cannot be removed."""
    for point in mounts_below(folder.resolve(), Path("/proc/self/mountinfo").read_text(encoding="utf-8")):
        subprocess.run(["umount", "-l", point], capture_output=True, check=False, timeout=60)


def _start(folder: Path, runtime: Path) -> tuple[subprocess.Popen[bytes], Path]:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "dockerd.log"
    with log.open("wb") as stream:
        command = ["dockerd", "--data-root", str(folder / "data"), "--exec-root", str(runtime)]
        command += ["--pidfile", str(runtime / "pid")]
        return subprocess.Popen(
            command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True
        ), log


def _refuse_copying_driver(docker: str) -> None:
    """vfs stores every layer as a copy of all layers below it: over 100 GB for these images."""
    if _info(docker, "{{.Driver}}") == "vfs":
        msg = "Docker has no overlay file system on this kernel, and its vfs driver would copy 7 GB per layer"
        raise OutOfReachError(msg)


def probe(docker: str) -> None:
    """Import and run a one-program image: an engine that answers may lack the rights for either (in a container or chroot).

    Raises OutOfReachError with the engine's error message.
    """
    program = str(Path(shutil.which("true") or "/bin/true").resolve())
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=False, timeout=60)
    files = [program, *re.findall(r"(/\S+) \(0x", linked.stdout)]
    packed = subprocess.run(
        ["tar", "-chf", "-", "-C", "/", *(name[1:] for name in files)], capture_output=True, check=True, timeout=60
    )
    image = ""
    for what, command, given in (
        ("unpack an image", ["import", "-"], packed.stdout),
        ("run a container", ["run", "--rm", "IMAGE", program], b""),
    ):
        words = [docker, *(image if word == "IMAGE" else word for word in command)]
        done = subprocess.run(words, input=given, capture_output=True, check=False, timeout=120)
        if done.returncode != 0:
            reason = " ".join(done.stderr.decode(errors="replace").split())[-500:]
            msg = f"a Docker engine was started here and cannot {what}: {reason}; run this on a host, or in a privileged container"
            raise OutOfReachError(msg)
        image = image or done.stdout.decode().strip()
    subprocess.run([docker, "rmi", "-f", image], capture_output=True, check=False, timeout=60)


def _info(docker: str, template: str) -> str:
    done = subprocess.run(
        [docker, "info", "--format", template], capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout.strip()


def require_space(docker: str, needed: float) -> None:
    """Raise OutOfReachError if the engine's disk has less than ``needed`` bytes free (when the disk is one of this machine)."""
    root = Path(_info(docker, "{{.DockerRootDir}}") or "/nonexistent")
    if root.is_dir() and shutil.disk_usage(root).free < needed:
        msg = (
            f"the images need {needed / 1e9:.0f} GB of disk while they are built, "
            f"and {shutil.disk_usage(root).free / 1e9:.0f} GB are free; make room (docker system prune)"
        )
        raise OutOfReachError(msg)


def _wait_until_running(docker: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIME_LIMIT
    while not is_running(docker):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            msg = f"a Docker engine was started and did not come up:\n{tail}"
            raise OutOfReachError(msg)
        time.sleep(0.5)


def ca_bundle(environment: Mapping[str, str]) -> Path | None:
    """The certificate bundle that this machine's clients use, to be passed into builds as a secret."""
    for variable in CA_VARIABLES:
        path = Path(environment.get(variable, ""))
        if environment.get(variable) and path.is_file():
            return path
    return None
