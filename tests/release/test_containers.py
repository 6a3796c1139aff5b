"""Images, without an engine: the commands sent to it, how its answers are read, and the message if there is none."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashmoe.errors import BuildError, UnsupportedGpuError
from flashmoe_build.compile.archs import resolve
from flashmoe_build.containers import base, engine, gpu, image, pins
from flashmoe_build.containers.image_test import BENCH, TEST, compare_wheels, require_images
from flashmoe_build.draw import drawn
from flashmoe_build.program import OutOfReachError
from flashmoe_tools.report import Verdict
from flashmoe_tools.tables import load_tables

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
DIGEST = "sha256:" + "ab" * 32


def copied_by_stage(name: str) -> list[tuple[list[str], str]]:
    """The sources and the target of every COPY in a stage of the Dockerfile."""
    stage = re.split(r"^FROM .* AS ", DOCKERFILE.replace("\\\n", " "), flags=re.MULTILINE)
    (body,) = (text for text in stage if text.startswith(f"{name}\n"))
    copies = [words.split() for words in re.findall(r"^COPY --chown=\S+ (.*)$", body, re.MULTILINE)]
    return [(words[:-1], words[-1]) for words in copies]


def test_the_toolchain_stage_holds_all_that_its_sessions_import(tmp_path: Path) -> None:
    copies = copied_by_stage("toolchain")
    assert len(copies) >= 4
    for sources, target in copies:
        for source in sources:
            to = tmp_path / target / Path(source).name if target.endswith("/") else tmp_path / target
            to.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, to)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "nox", "--list"]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "environments" in done.stdout


def test_the_build_command_carries_secrets_as_secrets(tmp_path: Path) -> None:
    secrets = {"ca": tmp_path / "ca.pem", "index": tmp_path / "index"}
    command = image.build_command("docker", "bench", tmp_path, base="b:1", archs="90a", secrets=secrets, network="host")
    assert command[:6] == ["docker", "build", "--target", "bench", "--tag", "flashmoe-bench:latest"]
    arguments = [command[at + 1] for at, word in enumerate(command) if word == "--build-arg"]
    assert {"FLASHMOE_ARCHS=90a", "BASE_BUILD=b:1", "BASE_RUN=b:1"} <= set(arguments)
    assert f'ARG ENVIRONMENTS="{image.ENVIRONMENTS["test"]}"' in DOCKERFILE
    assert "ENVIRONMENTS=build test bench" in arguments
    assert not [word for word in arguments if "INDEX" in word or "PROXY" in word]
    assert command[-4:] == [f"id=index,src={tmp_path / 'index'}", "--network", "host", str(tmp_path)]
    stage = image.build_command("docker", "toolchain", tmp_path, base="b:1", archs="90a", secrets={}, network="")
    assert stage[:6] == ["docker", "build", "--target", "toolchain", "--output", "type=cacheonly"]
    # The stage's layers depend on the same arguments, so that the later build finds them.
    assert stage[6:-1] == command[6 : 6 + len(stage[6:-1])]


def test_a_draw_gives_the_image_compiled_units_but_a_sample(tmp_path: Path) -> None:
    cache, docker, got = tmp_path / "cache", tmp_path / "docker", tmp_path / "got.tar"
    keys = [f"{number:02x}{number:062x}" for number in range(80)]
    for key in keys:
        for suffix in (".cubin", ".json"):
            path = cache / key[:2] / f"{key}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(key)
            path.chmod(0o600)  # as the cache writes them: the image has a different user
    docker.write_text(f'#!/bin/sh\n[ "$*" = "import - {image.PREBUILT}" ] && exec cat >"{got}"\n')
    docker.chmod(0o755)
    for draw in ("one", "another"):
        withheld = image.import_prebuilt(str(docker), cache, draw)
        with tarfile.open(got) as packed:
            given = {member.name: member.mode for member in packed.getmembers()}
        assert set(given.values()) == {0o644}
        assert {f"{name.removesuffix('.cubin')}.json" for name in given if name.endswith(".cubin")} <= given.keys()
        assert {key for key in keys if f"{key[:2]}/{key}.cubin" not in given} == drawn(keys, image.REBUILD_EVERY, draw)
        assert withheld == len(keys) // image.REBUILD_EVERY == len(keys) - len(given) // 2
    command = image.build_command("docker", "test", tmp_path, base=None, archs="75", secrets={}, network="", given="g")
    assert "COMPILED=g" in command
    assert {image.drawn_targets({"FLASHMOE_DRAW": draw})[0] for draw in "abcdef"} == set(image.TARGETS)
    assert image.drawn_targets({}) == list(image.TARGETS)


def test_over_draws_everything_has_its_turn() -> None:
    names = [f"case {number}" for number in range(100)]
    parts = {frozenset(drawn(names, 3, f"commit {number}")) for number in range(60)}
    assert sorted(map(len, parts)) == [33, 33, 34]
    assert frozenset.union(*parts) == set(names)
    assert [len(drawn(names[:many], 3, "any")) for many in (0, 1, 2, 3)] == [0, 1, 1, 1]


def test_over_commits_ci_compiles_every_target() -> None:
    script, tables = (ROOT / ".ci" / "run").read_text(), load_tables()
    (always,), (others,) = (
        re.findall(r"FLASHMOE_ARCHS=([\w,]+),\$", script),
        re.findall(r"^targets=\((.*)\)", script, re.M),
    )
    names = [{one.name for one in resolve(f"{always},{other}", tables)} for other in others.split()]
    assert set.union(*names) == {one.name for one in tables.targets}
    assert set.intersection(*names) == {"sm_75", "sm_90a"}


def test_images_are_there_before_they_are_run() -> None:
    def client(*tags: str) -> SimpleNamespace:
        return SimpleNamespace(images=SimpleNamespace(list=lambda: [SimpleNamespace(tags=[tag]) for tag in tags]))

    require_images(client(TEST, BENCH))
    with pytest.raises(BuildError, match=rf"no image {BENCH} on this machine; build them with \./nox -s image"):
        require_images(client(TEST, "other:latest"))
    require_images(client(TEST), [TEST])


def test_what_a_build_needs_of_the_network() -> None:
    environment = {"PIP_INDEX_URL": "http://localhost:3141/simple", "HOME": "/h", "HTTPS_PROXY": ""}
    assert image.network_settings(environment) == {"PIP_INDEX_URL": "http://localhost:3141/simple"}
    assert image._network(environment) == "host"
    assert image._network({"PIP_INDEX_URL": "https://packages.example.org/simple"}) == ""
    assert image._network({**environment, "FLASHMOE_DOCKER_NETWORK": "none"}) == "none"


def test_secrets_reach_one_command_and_no_layer() -> None:
    for line in DOCKERFILE.splitlines():
        assert "COPY" not in line or "/run/secrets" not in line
    runs = re.findall(r"^RUN (?:.*\\\n)*.*$", DOCKERFILE, re.MULTILINE)
    with_secret = [run for run in runs if "type=secret" in run]
    assert with_secret
    assert all("docker/with-network" in run for run in with_secret)
    assert not re.search(r"^(?:ARG|ENV) .*(?:TOKEN|PASSWORD|INDEX_URL|CERT)", DOCKERFILE, re.MULTILINE)


def test_secrets_are_handed_to_the_command(tmp_path: Path) -> None:
    script = (ROOT / "docker" / "with-network").read_text().replace("/run/secrets", str(tmp_path))
    (tmp_path / "ca").write_text("certificate")
    (tmp_path / "index").write_text("PIP_INDEX_URL=https://a.example.org/x?y=1\nNO_PROXY=a, b\n")
    shown = subprocess.run(["sh", "-c", script, "sh", "env"], capture_output=True, text=True, check=True, timeout=30)
    assert "PIP_INDEX_URL=https://a.example.org/x?y=1\n" in shown.stdout
    assert "NO_PROXY=a, b\n" in shown.stdout
    assert f"PIP_CERT={tmp_path}/ca\n" in shown.stdout


def test_the_dockerfile_installs_nothing_from_a_moving_archive() -> None:
    commands = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    assert not re.search(r"apt-get|apt |curl|wget|pip install", commands)
    assert re.findall(r"^FROM (\S+)", commands, re.MULTILINE) == [
        "${COMPILED}", "${BASE_BUILD}", "base", "toolchain", "build", "toolchain", "${BASE_RUN}",
    ]  # fmt: skip
    last = commands.rsplit("\nFROM ", 1)[1]
    assert re.search(r"^USER 10001$", last, re.MULTILINE)
    for label in ("revision", "source", "version"):
        assert f"org.opencontainers.image.{label}=" in last


def test_both_bases_are_pinned() -> None:
    found = {pin.variable: pin.image for pin in pins.read_pins(DOCKERFILE)}
    assert found == {"BASE_BUILD": "python:3.12-bookworm", "BASE_RUN": "python:3.12-slim-bookworm"}


def test_digests_are_rewritten() -> None:
    text, changes = pins.rewrite(DOCKERFILE, lambda name: DIGEST)
    assert len(changes) == 2
    assert {pin.digest for pin in pins.read_pins(text)} == {DIGEST}
    assert pins.rewrite(text, lambda name: DIGEST) == (text, [])
    with pytest.raises(BuildError, match="not a sha256 digest"):
        pins.rewrite(DOCKERFILE, lambda name: "latest")
    with pytest.raises(BuildError, match="BASE_RUN is not pinned"):
        pins.read_pins(re.sub(r"(slim-bookworm)@\S+", r"\1", DOCKERFILE))


def test_another_version_in_the_archive_is_named() -> None:
    pinned = base.parse_pins("# comment\n\ngcc=12.2.0\nlibc6=2.36-9\ngone=1\n")
    assert base.differences(pinned, {"gcc": "12.2.0", "libc6": "2.36-10", "new": "3"}) == [
        "gone: pinned 1, found not installed",
        "libc6: pinned 2.36-9, found 2.36-10",
        "new: pinned not at all, found 3",
    ]
    assert base.differences(pinned, pinned) == []


def test_the_committed_pins_name_what_the_base_must_hold() -> None:
    pinned = base.parse_pins(base.PINS.read_text())
    assert {name for name in base.PACKAGES if name != "python3-venv"} <= set(pinned)
    assert all(re.fullmatch(r"[\w.+:~-]+", version) for version in pinned.values())


@pytest.mark.parametrize("text", ["E: Couldn't download dists/bookworm/Release", "E: Failed getting release file"])
def test_an_archive_out_of_reach_is_no_failure_of_ours(text: str) -> None:
    assert isinstance(base.judged(f"I: Retrieving\n{text}\n"), OutOfReachError)


def test_a_bad_signature_is_a_failure() -> None:
    error = base.judged("E: Release signed by unknown key (key id 0123)")
    assert type(error) is BuildError


def test_without_a_client_the_session_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Path, "exists", lambda path: False)
    monkeypatch.setattr(engine.shutil, "which", lambda name: None)
    with pytest.raises(OutOfReachError, match=r"apt-get install docker\.io"):
        engine.docker_program()


def test_without_an_engine_the_session_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "docker_program", lambda: "docker")
    monkeypatch.setattr(engine, "_info", lambda docker, template: "")
    with pytest.raises(OutOfReachError, match="no Docker engine answers; start one"):
        engine.engine()


def test_nothing_built_has_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> str:
        msg = "no engine"
        raise OutOfReachError(msg)

    monkeypatch.setattr(engine, "docker_program", refuse)
    assert image.main([]) == 3
    assert base.main([]) == 3
    assert "no image was built: no engine" in capsys.readouterr().err


DOCKER = """\
#!/bin/sh
case $1 in
    version) [ -e "{started}" ] ;;
    info) echo overlay2 ;;
    import) [ "{refuses}" != import ] || {{ echo 'remount /: invalid argument' >&2; exit 1; }}; cat >/dev/null; echo sha256:1 ;;
    run) [ "{refuses}" != run ] || {{ echo 'unshare: operation not permitted' >&2; exit 125; }} ;;
esac
"""


def fake_programs(folder: Path, refuses: str = "") -> Path:
    """Sets up .ci/images in ``folder`` with an engine that fails at ``refuses``; returns the file with the engine's process id."""
    started, script = folder / "started", (ROOT / ".ci" / "images").read_text().replace("/usr/bin/docker", "docker")
    start = "echo no iptables; exit 1" if refuses == "start" else f"echo $$ >{started}; exec sleep 60"
    programs = {"docker": DOCKER.format(started=started, refuses=refuses), "dockerd": f"#!/bin/sh\n{start}\n"}
    programs |= dict.fromkeys(("debootstrap", "id"), "#!/bin/sh\necho 0\n") | {"ci/images": script}
    for name, text in programs.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return started


@pytest.mark.parametrize(
    ("refuses", "message"),
    [
        ("start", "the engine did not come up: no iptables"),
        ("import", "the engine cannot unpack an image: remount /: invalid argument"),
        ("run", "the engine cannot run a container: unshare: operation not permitted"),
    ],
)
def test_an_engine_that_cannot_run_anything_is_not_run(tmp_path: Path, refuses: str, message: str) -> None:
    """The errors in an unprivileged container and in a chroot that is not a mount point. The engine that was started is ended."""
    started = fake_programs(tmp_path, refuses)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / "ci/images"], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
    assert f"images: NOT RUN (not passed): {message}" in done.stdout
    if started.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(started.read_text()), 0)
    assert not (tmp_path / "build" / "docker").exists()


def test_compiled_units_are_taken_when_the_build_has_made_them(tmp_path: Path) -> None:
    fake_programs(tmp_path)
    calls, built = tmp_path / "calls", tmp_path / "built"
    (tmp_path / "nox").write_text(
        f'#!/bin/sh\necho "$@" >>{calls}; mkdir -p build/reports; echo 1 >build/reports/$2.json\n'
    )
    (tmp_path / "nox").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    base = "-s image -- {}--base flashmoe-base:bookworm{}"
    first = ["-s base_image", base.format("--environments ", "")]
    with subprocess.Popen([tmp_path / "ci/images", built], env=environ, stdout=subprocess.DEVNULL) as process:
        try:
            while not calls.exists() or len(calls.read_text().splitlines()) < 2:
                assert process.poll() is None
            time.sleep(1.5)
            assert calls.read_text().splitlines() == first
            (tmp_path / "build" / "cache").mkdir()
            built.touch()
            assert process.wait(60) == 0
        finally:
            process.terminate()
    last = [base.format("", " --given build/cache"), "-s image_test -- tests/attention/test_extension.py"]
    assert [line.partition(" tests/attention/test_checks")[0] for line in calls.read_text().splitlines()] == [
        *first,
        *last,
    ]


def test_too_little_disk_is_said_before_anything_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "_info", lambda docker, template: str(tmp_path))
    engine.require_space("docker", 1)
    with pytest.raises(OutOfReachError, match="the images need"):
        engine.require_space("docker", 1e18)


def record(**changes: object) -> dict[str, object]:
    return {
        "commit": "c" * 40,
        "dirty": False,
        "compilers": {"cxx": "g++ 12.2.0"},
        "binaries": [{"name": "a", "target": "sm_80", "sha256": "1"}],
        **changes,
    }


def test_wheels_inside_and_outside() -> None:
    def verdicts(inside: tuple[str, dict[str, object]], outside: tuple[str, dict[str, object]]) -> list[Verdict]:
        return [check.verdict for check in compare_wheels(inside, outside)]

    assert verdicts(("1", record()), ("1", record())) == [Verdict.PASS, Verdict.PASS]
    assert verdicts(("1", record()), ("2", record())) == [Verdict.PASS, Verdict.FAIL]
    other = record(compilers={"cxx": "g++ 14.1.0"})
    assert verdicts(("1", record()), ("2", other)) == [Verdict.PASS, Verdict.SKIP]
    edited = record(binaries=[{"name": "a", "target": "sm_80", "sha256": "2"}])
    assert verdicts(("1", record()), ("1", edited))[0] is Verdict.FAIL
    assert verdicts(("1", record(binaries=[])), ("1", record(binaries=[])))[0] is Verdict.FAIL
    assert verdicts(("1", record()), ("1", record(commit="d" * 40))) == [Verdict.FAIL]


def test_a_gpu_job_runs_on_the_gpu_that_it_names() -> None:
    sm90 = gpu.find_gpu("sm90", load_tables(ROOT / "csrc").gpus)
    gpu.check_capability(sm90, "8.0\n9.0\n")
    with pytest.raises(UnsupportedGpuError, match=r"labelled sm90 \(compute capability 9\.0\), and has no GPU"):
        gpu.check_capability(sm90, "")
    with pytest.raises(UnsupportedGpuError, match="known: sm75"):
        gpu.find_gpu("sm42", load_tables(ROOT / "csrc").gpus)
    command = gpu.command_of("docker", f"r.example.org/a/b@{DIGEST}", ["-x"])
    assert command[-2:] == [f"r.example.org/a/b@{DIGEST}", "-x"]
    assert "FLASHMOE_REQUIRE_GPU=1" in command
    with pytest.raises(UnsupportedGpuError, match="by digest"):
        gpu.command_of("docker", "flashmoe-test:latest", [])


def entrypoint(tmp_path: Path, program: str, results: Path) -> subprocess.Popen[str]:
    """The benchmark image's entrypoint with another program instead of the benchmark."""
    fake_python = tmp_path / "python"
    fake_python.write_text(f"#!/bin/sh\n{program}\n")
    fake_python.chmod(0o755)
    text = (ROOT / "docker" / "bench-entrypoint").read_text().replace("/opt/flashmoe/env/bin/python", str(fake_python))
    (tmp_path / "entrypoint").write_text(text)
    return subprocess.Popen(
        ["sh", str(tmp_path / "entrypoint")], env={"FLASHMOE_RESULTS": str(results), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_the_benchmarks_status_is_the_containers(tmp_path: Path) -> None:
    process = entrypoint(tmp_path, "echo table; exit 7", tmp_path)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 7
    assert "table" in output


def test_results_that_cannot_be_written_are_said_at_once(tmp_path: Path) -> None:
    process = entrypoint(tmp_path, "echo started", tmp_path / "nowhere")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "cannot be written by user" in output
    assert "started" not in output


@pytest.mark.parametrize("wrote", [True, False])
def test_a_stop_reaches_the_benchmark_and_says_what_is_left(tmp_path: Path, wrote: bool) -> None:
    write = f"echo '{{}}' >{tmp_path}/bench.json; " if wrote else ""
    process = entrypoint(tmp_path, f"trap '{write}exit 130' TERM; echo ready; while :; do sleep 0.1; done", tmp_path)
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        pass
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert ("marked as partial" if wrote else "no file was written") in output


def test_the_benchmark_image_imports_nothing_from_the_mounted_folder() -> None:
    text = (ROOT / "docker" / "bench-entrypoint").read_text()
    (line,) = [line for line in text.splitlines() if "-m flashmoe bench" in line]
    assert line.split()[1].startswith("-I")
