"""``nox -s image_test``: runs the built images through the Docker SDK and checks what was promised of them."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashmoe.errors import ExitCode, FlashmoeError
from flashmoe.progress import Progress
from flashmoe.report import Check, Report, Verdict, host_environment, utc_now, write_report
from flashmoe_build.containers.engine import engine
from flashmoe_build.containers.image import TARGETS

ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT = 1800  # seconds of one container
QUICK = ("--device", "cpu", "--suite", "smoke", "--quick")
TEST = f"{TARGETS['test']}:latest"
BENCH = f"{TARGETS['bench']}:latest"


class Images:
    """Runs containers of the images and returns (exit status, output)."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def run(self, image: str, command: Sequence[str] = (), *, what: str, **options: Any) -> tuple[int, str]:
        container = self.client.containers.run(image, list(command), detach=True, **options)
        lines: list[str] = []
        try:
            with Progress(what) as progress:
                for line in container.logs(stream=True, follow=True):
                    lines.append(line.decode(errors="replace"))
                    progress.note(lines[-1].strip()[:100])
                status = container.wait(timeout=RUN_LIMIT)["StatusCode"]
            return int(status), "".join(lines)
        finally:
            container.remove(force=True)

    def shell(self, image: str, script: str, **options: Any) -> tuple[int, str]:
        return self.run(image, ["-c", script], what="looking inside", entrypoint="/bin/sh", **options)


def check_wheel_hash(images: Images) -> Check:
    """The image's wheel is byte for byte the one built outside, where there is one of the same commit and g++."""
    name = "wheel in the image equals the wheel outside"
    _, listed = images.shell(
        TEST,
        "sha256sum dist/*.whl; unzip -p dist/*.whl flashmoe/provenance.json 2>/dev/null || python3 -c \"import glob, zipfile; print(zipfile.ZipFile(glob.glob('dist/*.whl')[0]).read('flashmoe/provenance.json').decode())\"",
    )
    inside = listed.split()[0]
    provenance = json.loads(listed[listed.index("{") :])
    wheels = sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        return Check(
            name,
            Verdict.SKIP,
            found=inside,
            expected="a wheel in dist/",
            next_step="nox -s build, then nox -s image_test",
        )
    outside = hashlib.sha256(wheels[-1].read_bytes()).hexdigest()
    verdict = Verdict.PASS if inside == outside else Verdict.FAIL
    why = f"inside: commit {provenance['commit'][:12]}, dirty {provenance['dirty']}, {provenance['compilers']['cxx']}"
    return Check(
        name,
        verdict,
        found=inside,
        expected=outside,
        why=why,
        next_step="build both from one clean commit with the same g++",
    )


def check_tests(images: Images, arguments: Sequence[str]) -> Check:
    status, output = images.run(TEST, arguments, what="tests in the image")
    closing = re.findall(r"^=+ (.*(?:passed|failed|error).*) =+$", output, re.MULTILINE)
    ran = bool(closing) and re.search(r"[1-9]\d* passed", closing[-1]) is not None
    verdict = Verdict.PASS if status == 0 and ran else Verdict.FAIL
    found = closing[-1] if closing else output[-1500:]
    return Check("tests pass inside", verdict, found=found, expected="exit 0 and tests passed")


def check_bench(images: Images) -> Check:
    """On a read-only root file system: the table, three files, and the word that no GPU took part."""
    with tempfile.TemporaryDirectory() as results:
        Path(results).chmod(0o777)
        options = {"volumes": {results: {"bind": "/results", "mode": "rw"}}, "read_only": True, "tmpfs": {"/tmp": ""}}
        status, output = images.run(BENCH, QUICK, what="benchmark in the image", **options)
        names = sorted(path.name for path in Path(results).iterdir())
        report = json.loads((Path(results) / "bench.json").read_text()) if "bench.json" in names else {}
    complete = names == ["bench.html", "bench.json", "bench.md"] and report.get("verdict") in ("PASS", "WARN")
    verdict = Verdict.PASS if status == 0 and complete else Verdict.FAIL
    return Check(
        "bench writes its three files, read-only root",
        verdict,
        found=f"exit {status}, {names}",
        expected="exit 0, bench.html bench.json bench.md",
        why="" if verdict is Verdict.PASS else output[-1500:],
    )


def check_unwritable(images: Images) -> Check:
    with tempfile.TemporaryDirectory() as results:
        options = {"volumes": {results: {"bind": "/results", "mode": "ro"}}}
        status, output = images.run(BENCH, QUICK, what="unwritable results", **options)
    verdict = Verdict.PASS if status == 2 and "cannot be written" in output else Verdict.FAIL
    return Check(
        "unwritable /results is said at once",
        verdict,
        found=f"exit {status}: {output.strip()[-200:]}",
        expected="exit 2 and how to mount it",
    )


def check_sigterm(images: Images) -> Check:
    """Stopped in the middle: no half-written file, and what is there can be read."""
    with tempfile.TemporaryDirectory() as results:
        Path(results).chmod(0o777)
        container = images.client.containers.run(
            BENCH,
            ["--device", "cpu", "--suite", "cpu"],
            detach=True,
            volumes={results: {"bind": "/results", "mode": "rw"}},
        )
        try:
            time.sleep(20)
            begun = time.monotonic()
            container.stop(timeout=60)
            seconds = time.monotonic() - begun
            status = container.wait()["StatusCode"]
            output = container.logs().decode(errors="replace")
        finally:
            container.remove(force=True)
        broken = []
        for path in Path(results).iterdir():
            try:
                if path.suffix == ".json":
                    json.loads(path.read_text())
                elif not path.read_text().strip() or path.suffix not in {".md", ".html"}:
                    broken.append(path.name)
            except ValueError:
                broken.append(path.name)
    good = not broken and seconds < 55 and status != 137
    return Check(
        "SIGTERM ends it cleanly",
        Verdict.PASS if good else Verdict.FAIL,
        found=f"exit {status} after {seconds:.0f} s, broken files {broken}; {output.strip()[-200:]}",
        expected="ends by itself within 55 s, no half-written file",
    )


def check_config(images: Images) -> Check:
    """Unprivileged user, labels filled in, no certificate or secret left in a layer."""
    image = images.client.images.get(BENCH)
    config = image.attrs["Config"]
    labels = config.get("Labels") or {}
    problems = []
    if config.get("User") in ("", "root", "0", None):
        problems.append("runs as root")
    for key in ("revision", "source", "version"):
        if f"org.opencontainers.image.{key}" not in labels:
            problems.append(f"no label {key}")
    if re.fullmatch(r"[0-9a-f]{40}", labels.get("org.opencontainers.image.revision", "")) is None:
        problems.append(f"revision {labels.get('org.opencontainers.image.revision')!r} is no commit")
    _, listed = images.shell(
        BENCH,
        "find /run/secrets /etc/ssl/private -type f 2>/dev/null; env | grep -iE 'cert|token|password|index_url' || true",
    )
    if listed.strip():
        problems.append(f"left behind: {listed.strip()[:200]}")
    return Check(
        "bench image: user, labels, no secrets",
        Verdict.FAIL if problems else Verdict.PASS,
        found="; ".join(problems) or "as promised",
        expected="unprivileged, OCI labels, nothing secret",
    )


def test_images(arguments: Sequence[str]) -> Report:
    docker = importlib.import_module("docker")  # by name: a type checker would take the folder docker/ for it
    started, clock = utc_now(), time.monotonic()
    with engine(ROOT / "build" / "docker"):
        images = Images(docker.from_env(timeout=RUN_LIMIT))
        steps: list[Callable[[], Check]] = [
            lambda: check_config(images),
            lambda: check_wheel_hash(images),
            lambda: check_unwritable(images),
            lambda: check_bench(images),
            lambda: check_sigterm(images),
            lambda: check_tests(images, arguments),
        ]
        checks = []
        for step in steps:
            checks.append(step())
            print(f"{checks[-1].verdict} {checks[-1].name}: {checks[-1].found[:200]}", flush=True)
    return Report(
        "image_test", tuple(checks), {}, host_environment(), tuple(sys.argv[1:]), started, time.monotonic() - clock
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flashmoe_build.containers.image_test", description=__doc__)
    parser.add_argument("pytest", nargs="*", help="passed to pytest in the test image")
    options = parser.parse_args(arguments)
    try:
        report = test_images(options.pytest)
    except FlashmoeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.FAILED
    write_report(ROOT / "build" / "reports" / "image_test.json", report)
    return report.exit_code


if __name__ == "__main__":
    os.umask(0o022)
    raise SystemExit(main())
