"""Runs every shell step of every workflow in job order without a forge: the files that a step needs must exist.

Sessions are a fake that knows their names and creates the files that they would. Programs that would reach another machine only
record their call. A job in a container gets a checkout that belongs to another user, as on the forge.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.nox_sessions import SESSIONS

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
JOBS = [
    (path.name, name)
    for path in WORKFLOWS
    for name, job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items()
    if "steps" in job
]
WHEEL = "flashmoe_kernels-0.1.0-py3-none-manylinux_2_28_{}.whl"
# Files that sessions create; with --platform aarch64 in folders of that name.
NOX = f"""#!/bin/bash
set -eu
git rev-parse HEAD >/dev/null  # as every session that asks for the commit
[ "$1" = -s ] && shift
mkdir -p build/reports
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case " {" ".join(SESSIONS)} " in *" $1 "*) ;; *) echo "no session $1" >&2; exit 1 ;; esac
    where= machine=x86_64
    case "$*" in *"--platform aarch64"*) where=/aarch64 machine=aarch64 ;; esac
    case $1 in
    build)
        mkdir -p dist$where build$where/objects
        case "$*" in *--sdist*) touch dist/flashmoe_kernels-0.1.0.tar.gz ;; *)
            touch dist$where/{WHEEL.format("$machine")} build$where/provenance.json build$where/flashmoe.cdx.json ;;
        esac ;;
    statement) for folder in build build/aarch64; do [ ! -d $folder ] || touch $folder/provenance.intoto.json; done ;;
    verify | symbols | reproduce) for word in "$@"; do case $word in *.whl) [ -f "$word" ] ;; esac; done ;;
    test | test_aarch64) [ -z "${{FLASHMOE_WHEEL-}}" ] || [ -f "$FLASHMOE_WHEEL" ] ;;
    image | image_test) if [ -n "${{SMALL_DISK-}}" ]; then echo "NOT RUN (not passed)"; shift; continue; fi ;;
    bench) for word in "$@"; do case $word in *.toml) [ -f "$word" ] ;; esac; done ;;
    workflows) echo 'gpus=["sm90"]' >>"$GITHUB_OUTPUT" ;;
    site) mkdir -p build/site ;;
    esac
    echo "{{}}" >build/reports/$1.json
    shift
done
"""
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in
*--password-stdin*) cat >/dev/null ;;  # else the writer may meet a closed pipe
*RepoDigests*) echo ghcr.io/x/y@sha256:0 ;;
"save "*) echo image ;;
esac
"""
SUDO = '#!/bin/sh\nwhile case "$1" in *=*) true ;; *) false ;; esac; do shift; done\ncase $1 in rm) ;; *) exec "$@" ;; esac\n'


class Runner:
    """One job in a separate folder."""

    def __init__(self, folder: Path, workflow: str, job: str, **environment: str) -> None:
        self.text = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text(encoding="utf-8"))
        self.job = self.text["jobs"][job]
        self.tree, self.bin, self.home = folder / "tree", folder / "bin", folder / "home"
        for made in (self.tree, self.bin, self.home, folder / "temp"):
            made.mkdir(parents=True)
        for name in ("docker", "apt-get", "gh", "find"):  # find: for the runner's Pythons
            self._program(self.bin / name, PROGRAM)
        self._program(self.bin / "sudo", SUDO)
        self._program(self.tree / "nox", NOX)
        (self.tree / "pyproject.toml").write_text(
            (ROOT / "pyproject.toml").read_text(encoding="utf-8"), encoding="utf-8"
        )
        source = re.search(r'^Source = "(https://[^/]+)/(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert source
        self.environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "CALLS": str(folder / "calls"),
            "GITHUB_WORKSPACE": str(self.tree),
            "GITHUB_SERVER_URL": source[1],
            "GITHUB_REPOSITORY": source[2],
            "GITHUB_REF_NAME": "v0.1.0",
            "GITHUB_SHA": "0" * 40,
            "RUNNER_TEMP": str(folder / "temp"),
            **{name: str(folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")},
            "GIT_CONFIG_SYSTEM": str(folder / "gitconfig"),
            **environment,
        }
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "x")):
            subprocess.run(["git", *words], cwd=self.tree, check=True, env=self.environment)
        if "container" in self.job:
            self.environment["GIT_TEST_ASSUME_DIFFERENT_OWNER"] = "1"

    def _program(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def run(self) -> list[str]:
        """Descriptions of what failed."""
        for step in self.job["steps"]:
            if "run" in step:
                assert "${{" not in step["run"], "an expression in a script can be an injection: pass it by env"
                given = {name: self._value(str(value)) for name, value in step.get("env", {}).items()}
                command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
                done = subprocess.run(
                    command, cwd=self.tree, env=self.environment | given, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    return [f"{step.get('name') or step['run']}: {done.stdout}{done.stderr}"]
            elif missing := self._use(step["uses"].partition("@")[0], step.get("with", {})):
                return missing
        return []

    def _value(self, text: str) -> str:
        bundle = self.home / "bundle"
        bundle.touch()
        if "bundle-path" in text:
            return str(bundle)
        return re.sub(r"\$\{\{.*?\}\}", "sm90" if "gpu" in text else "x", text)

    def _use(self, action: str, given: dict[str, Any]) -> list[str]:
        folder = Path(str(given.get("path", ".")).replace("${{ runner.temp }}", self.environment["RUNNER_TEMP"]))
        if action.endswith("download-artifact"):
            self._download(self.tree / folder, str(given["name"]))
        if action.endswith("upload-artifact"):
            patterns = str(given["path"]).split()
            return [f"nothing to upload: {pattern}" for pattern in patterns if not any(self.tree.glob(pattern))]
        return []

    def _download(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if name == "image-test":
            (folder / "flashmoe-test.tar.gz").touch()
            return
        wheels = folder / "dist" if name == "release" else folder
        wheels.mkdir(exist_ok=True)
        for machine in ("x86_64", "aarch64") if name == "release" else ("x86_64",):
            (wheels / WHEEL.format(machine)).touch()


@pytest.mark.parametrize("home", ["home", "no HOME"])
@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_the_steps_of_a_job_fit_together(workflow: str, job: str, home: str, tmp_path: Path) -> None:
    """For a job in a container, "no HOME" is a folder that belongs to another user and cannot be written, as on the forge."""
    runner = Runner(tmp_path, workflow, job)
    if home == "no HOME":
        runner.environment.pop("HOME")
        if "container" in runner.job:
            runner.environment["HOME"] = "/proc/none"
    assert runner.run() == []


@pytest.mark.parametrize(("workflow", "job"), [("ci.yml", "image"), ("release.yml", "image")])
def test_images_that_a_small_disk_prevents_are_no_pass(workflow: str, job: str, tmp_path: Path) -> None:
    (failed,) = Runner(tmp_path, workflow, job, SMALL_DISK="1").run()
    assert "images that were not built are no pass" in failed


def test_another_users_checkout_is_trusted_by_the_step_that_says_so_alone(tmp_path: Path) -> None:
    runner = Runner(tmp_path, "build.yml", "build")
    steps = runner.job["steps"]
    runner.job["steps"] = [step for step in steps if "safe.directory" not in step.get("run", "")]
    assert len(runner.job["steps"]) == len(steps) - 1
    (failed,) = runner.run()
    assert "dubious ownership" in failed


@pytest.mark.parametrize("home", [None, "/proc/none"], ids=["no HOME", "a home that cannot be written"])
def test_the_launcher_needs_no_home(home: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HOME"} | (
        {"HOME": home} if home else {}
    )
    done = subprocess.run(
        [str(ROOT / "nox"), "--list"], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "* main" in done.stdout
