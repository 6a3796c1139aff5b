"""``nox -s image_test``: runs the built images through the Docker SDK and checks that they behave as documented."""

import argparse
import hashlib
import importlib
import json
import os
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmoe.errors import BuildError
from flashmoe_build.compile.archs import VARIABLES
from flashmoe_build.containers.engine import engine
from flashmoe_build.containers.image import TARGETS, drawn_targets, make_context
from flashmoe_build.program import ROOT, Stopwatch, ending, finish, run
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import Check, Report, Verdict

RUN_LIMIT = 1800  # seconds, for one container
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


def require_images(client: Any, required: Sequence[str] = (TEST, BENCH)) -> None:
    """Raises BuildError if the engine lacks one of the images."""
    there = {tag for image in client.images.list() for tag in image.tags}
    missing = [name for name in required if name not in there]
    if missing:
        msg = f"no image {' and no image '.join(missing)} on this machine; build them with ./nox -s image -- test bench"
        raise BuildError(msg)


def wheel_inside(images: Images, image: str) -> tuple[str, dict[str, Any]]:
    """sha256 and provenance of the wheel inside an image."""
    folder = "dist" if image == TEST else "/opt/flashmoe/dist"
    script = (
        f"import glob, hashlib, zipfile; name, = glob.glob('{folder}/*.whl'); record = 'flashmoe/provenance.json'; "
        "print(hashlib.sha256(open(name, 'rb').read()).hexdigest(), zipfile.ZipFile(name).read(record).decode())"
    )
    _, output = images.run(image, ["-c", script], what="looking inside", entrypoint="python3")
    digest, _, record = output.partition(" ")
    return digest, json.loads(record)


def wheel_outside(python: Path, targets: Sequence[str], scratch: Path) -> tuple[str, dict[str, Any]]:
    """sha256 and provenance of a wheel that this machine builds from a fresh clone of HEAD. Device code comes from the cache if present."""
    context = make_context(scratch)
    environment = {key: value for key, value in os.environ.items() if key not in (*VARIABLES, "SOURCE_DATE_EPOCH")}
    environment |= {"FLASHMOE_ARCHS": ",".join(targets), "FLASHMOE_CACHE_DIR": str(ROOT / "build" / "cache")}
    run(
        [str(python), "-m", "flashmoe_build"],
        "wheel outside",
        time_limit=RUN_LIMIT,
        cwd=context,
        environment=environment,
    )
    (wheel,) = (context / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        record = json.loads(archive.read("flashmoe/provenance.json"))
    return hashlib.sha256(wheel.read_bytes()).hexdigest(), record


def compare_wheels(inside: tuple[str, Mapping[str, Any]], outside: tuple[str, Mapping[str, Any]]) -> list[Check]:
    """Device binaries must be the same with any host compiler; the whole wheel must be if the host compiler is the same."""
    (digest, record), (other_digest, other) = inside, outside
    if record["commit"] != other["commit"]:
        found = f"the image is of commit {record['commit'][:12]}, this checkout of {other['commit'][:12]}"
        return [Check("image of this commit", Verdict.FAIL, found, "the same commit", next_step="nox -s image")]
    cubins, others = ({(b["name"], b["target"]): b["sha256"] for b in r["binaries"]} for r in (record, other))
    differing = sorted(key for key in {*cubins, *others} if cubins.get(key) != others.get(key))
    checks = [
        Check(
            "device binaries in the image equal those outside",
            Verdict.FAIL if differing or not cubins else Verdict.PASS,
            found=f"{len(cubins)} inside, {len(differing)} differ {differing[:3] or ''}".strip(),
            expected=f"the {len(others)} of the same commit outside",
            next_step="nox -s reproduce" if differing else "",
        )
    ]
    name = "wheel in the image equals the wheel outside"
    compilers = record["compilers"]["cxx"], other["compilers"]["cxx"]
    if compilers[0] != compilers[1]:
        found = f"not comparable: {compilers[0]} inside, {compilers[1]} outside"
        return [*checks, Check(name, Verdict.SKIP, found, "the same g++", next_step="use the base's g++ outside")]
    same = digest == other_digest
    why = f"commit {record['commit'][:12]} and {other['commit'][:12]}, dirty {record['dirty']} and {other['dirty']}, {compilers[0]}"
    return [*checks, Check(name, Verdict.PASS if same else Verdict.FAIL, digest, other_digest, why)]


def check_tests(images: Images, arguments: Sequence[str]) -> Check:
    status, output = images.run(TEST, arguments, what="tests in the image")
    closing = re.findall(r"^=+ (.*(?:passed|failed|error).*) =+$", output, re.MULTILINE)
    ran = bool(closing) and re.search(r"[1-9]\d* passed", closing[-1]) is not None
    verdict = Verdict.PASS if status == 0 and ran else Verdict.FAIL
    found = closing[-1] if closing else output[-1500:]
    return Check("tests pass inside", verdict, found=found, expected="exit 0 and tests passed")


def check_bench(images: Images) -> Check:
    """On a read-only root file system: the table, three files, and a note that there was no GPU."""
    with tempfile.TemporaryDirectory() as results:
        Path(results).chmod(0o777)
        options = {"volumes": {results: {"bind": "/results", "mode": "rw"}}, "read_only": True, "tmpfs": {"/tmp": ""}}
        status, output = images.run(BENCH, QUICK, what="benchmark in the image", **options)
        names = sorted(path.name for path in Path(results).iterdir())
        report = json.loads((Path(results) / "bench.json").read_text()) if "bench.json" in names else {}
        size = sum(path.stat().st_size for path in Path(results).iterdir())
    says_so = "no GPU in this container" in output or Path("/dev/nvidiactl").exists()
    complete = names == ["bench.html", "bench.json", "bench.md"] and report.get("verdict") in ("PASS", "WARN")
    verdict = Verdict.PASS if status == 0 and complete and says_so else Verdict.FAIL
    return Check(
        "bench writes its three files on a read-only root and says that there was no GPU",
        verdict,
        found=f"exit {status}, {names}, {size} bytes" + ("" if says_so else "; it does not say that there was no GPU"),
        expected="exit 0, bench.html bench.json bench.md",
        why="" if verdict is Verdict.PASS else output[-1500:],
    )


def check_unwritable(images: Images) -> Check:
    with tempfile.TemporaryDirectory() as results:
        options = {"volumes": {results: {"bind": "/results", "mode": "ro"}}}
        status, output = images.run(BENCH, QUICK, what="unwritable results", **options)
    verdict = Verdict.PASS if status == 2 and "cannot be written" in output else Verdict.FAIL
    return Check(
        "an unwritable /results is reported at once",
        verdict,
        found=f"exit {status}: {output.strip()[-200:]}",
        expected="exit 2 and how to mount it",
    )


def check_sigterm(images: Images) -> Check:
    """Stopped midway it leaves no half-written file, and the files that exist can be read."""
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
    good = not broken and seconds < 55 and status not in (0, 137) and "stopped by a signal" in output
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
        problems.append(f"revision {labels.get('org.opencontainers.image.revision')!r} is not a commit")
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


def test_images(arguments: Sequence[str], build_python: Path) -> Report:
    docker = importlib.import_module("docker")  # by name: a type checker would resolve it to the folder docker/
    clock = Stopwatch()
    engine()
    with tempfile.TemporaryDirectory(prefix="flashmoe-image-test-") as scratch:
        images = Images(docker.from_env(timeout=RUN_LIMIT))
        required = [f"{TARGETS[name]}:latest" for name in drawn_targets(os.environ)]
        require_images(images.client, required)

        def wheels() -> list[Check]:
            inside = wheel_inside(images, required[0])
            return compare_wheels(inside, wheel_outside(build_python, inside[1]["targets"], Path(scratch)))

        of_bench: list[Callable[[], list[Check]]] = [
            lambda: [check_config(images)],
            lambda: [check_unwritable(images)],
            lambda: [check_bench(images)],
            lambda: [check_sigterm(images)],
        ]
        steps = [wheels, *(of_bench if BENCH in required else ())]
        steps += [lambda: [check_tests(images, arguments)]] if TEST in required else []
        checks: list[Check] = []
        seconds = {}
        for step in steps:
            begun = time.monotonic()
            found = step()
            checks += found
            seconds[found[0].name] = round(time.monotonic() - begun, 1)
            for check in found:
                print(f"{check.verdict} {check.name}: {check.found[:200]}", flush=True)
    data = {"seconds": seconds, "pytest": list(arguments)}
    report = clock.report("image_test", checks, data)
    for check in checks:
        if check.verdict is Verdict.FAIL:
            print(f"FAIL {check.name}\n  found: {check.found}\n  expected: {check.expected}\n  {check.why}")
    print(f"image_test {report.verdict}: {len(checks)} checks, {report.seconds:.0f} s")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_build.containers.image_test", description=__doc__
    )
    parser.add_argument("--build-python", type=Path, required=True, help="interpreter of the locked build environment")
    parser.add_argument("pytest", nargs="*", help="passed to pytest in the test image")
    options, further = parser.parse_known_args(arguments)
    return ending(lambda: finish(test_images([*options.pytest, *further], options.build_python)), "no image was run")


if __name__ == "__main__":
    os.umask(0o022)
    raise SystemExit(main())
