"""CI's workflows: sessions that exist, pinned actions, a verdict that cannot be better than the jobs."""

import json
import re
from pathlib import Path

import pytest

from flashmoe.errors import ReportError
from flashmoe_build.release.workflows import PUSHED, REQUIRED, check, check_jobs, jobs_of, main, marked, summary
from flashmoe_tools.bench.ratchet import write_marks
from flashmoe_tools.report import Verdict
from flashmoe_tools.tables import load_tables
from tests.nox_sessions import SESSIONS

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
GPUS = tuple(load_tables(ROOT / "csrc").gpus)


def test_there_are_workflows_and_sessions() -> None:
    assert {path.name for path in WORKFLOWS} >= {"ci.yml", "nightly.yml", "release.yml", "gpu.yml", "ratchet.yml"}
    assert {"build", "test", "image", "workflows"} <= set(SESSIONS)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_calls_a_session_that_exists(path: Path) -> None:
    for name, text in jobs_of(path.read_text()).items():
        called = re.findall(r"\./nox -s ((?:\w+ ?)+)", text)
        if "uses: ./.github/workflows/" in text or name == PUSHED:  # it pushes what another job's session built
            assert not called
            continue
        assert called, f"{path.name}: {name} calls no session"
        words = {word for line in called for word in line.split()}
        assert words <= set(SESSIONS), f"{path.name}: {name} calls {words - set(SESSIONS)}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_by_commit_and_rights_are_given_job_by_job(path: Path) -> None:
    text = path.read_text()
    assert "\npermissions: {}\n" in text
    for used in re.findall(r"uses: (\S+)", text):
        assert used.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used), used
    pins = {(name.split("@")[0], name) for name in re.findall(r"uses: ([^.\s]\S+)", text)}
    assert len(pins) == len({name for name, _ in pins}), "one action at two commits"
    for name, job in jobs_of(text).items():
        assert "    permissions:\n" in job, f"{path.name}: {name}"
        assert "timeout-minutes:" in job or "uses: ./" in job, f"{path.name}: {name}"
        assert job.count("actions/checkout@") == job.count("persist-credentials: false"), f"{path.name}: {name}"


def test_one_action_has_one_commit_in_all_workflows() -> None:
    used = {use for path in WORKFLOWS for use in re.findall(r"uses: (\w[^\s@]*@\w+)", path.read_text())}
    assert len(used) == len({use.split("@")[0] for use in used})


def test_the_summary_needs_every_job(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert main(["--check"]) == 0
    assert check(text.replace("push-image, gpu, gpu-wheel]", "push-image, gpu-wheel]")) == 1
    assert "job ci must need every job and no other: gpu" in capsys.readouterr().err
    jobs = jobs_of(text)
    assert "if: always()" in jobs["ci"]
    assert set(REQUIRED) <= set(jobs)


def test_only_pushes_write_to_the_registry_and_reach_gpus() -> None:
    """A pull request or merge queue gets neither a token that may write, nor a GPU run without an image reference."""
    jobs = jobs_of((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert [name for name, text in jobs.items() if "packages: write" in text] == [PUSHED]
    assert "\n    if: github.event_name == 'push'" in "\n" + jobs[PUSHED]
    assert "    if: github.event_name == 'push' &&" in jobs["gpu"]
    assert f"needs: {PUSHED}\n" in jobs["gpu"]
    before = jobs["gpu-wheel"]
    assert "merge_group" in before
    assert "github.event.action == 'labeled' && github.event.label.name == 'gpu'" in before, (
        "a later push is not vetted"
    )
    assert "write" not in before


def test_ratchets_run_where_there_are_marks(tmp_path: Path) -> None:
    """Files of marks are named after a GPU model, runners after an architecture."""
    output = tmp_path / "output"
    assert marked({"GPU_RUNNERS": '["sm80", "sm90"]', "GITHUB_OUTPUT": str(output)}) == 0
    assert output.read_text() == 'gpus=["sm90"]\n'
    write_marks(tmp_path / "ratchet-nvidia-a30.toml", "NVIDIA A30", (), "sm80")
    assert marked({"GPU_RUNNERS": '["sm80", "sm90"]', "GITHUB_OUTPUT": str(output)}, tmp_path) == 0
    assert output.read_text().endswith('gpus=["sm80"]\n')
    assert marked({"GITHUB_OUTPUT": str(output)}, tmp_path) == 0
    assert output.read_text().endswith("gpus=[]\n")


def test_nothing_is_published_before_all_that_can_fail() -> None:
    jobs = jobs_of((ROOT / ".github" / "workflows" / "release.yml").read_text())
    needs = {
        name: set(re.search(r"needs: \[?([\w, -]+)", text)[1].split(", "))
        for name, text in jobs.items()
        if "needs:" in text
    }
    assert needs["publish-index"] == set(jobs) - {"publish-index", "publish"}
    assert "publish-index" in needs["publish"]


def test_the_release_is_attested_where_it_is_built() -> None:
    """It is attested by a reusable workflow, whose identity its caller cannot assume; no release job has a password."""
    folder = ROOT / ".github" / "workflows"
    build, release = jobs_of((folder / "build.yml").read_text()), jobs_of((folder / "release.yml").read_text())
    assert (folder / "build.yml").read_text().count("workflow_call:") == 1
    assert "uses: ./.github/workflows/build.yml" in release["build"]
    steps = build["build"]
    order = [
        "-s version -- --tag",
        "-s build symbols",
        "-s verify -- --rebuild",
        "--sdist",
        "-s statement",
        "attest-build-provenance@",
        "attest-sbom@",
    ]
    assert sorted(steps.index(step) for step in order) == [steps.index(step) for step in order]
    assert "secrets." not in (folder / "release.yml").read_text() + (folder / "build.yml").read_text()
    assert "gh-action-pypi-publish@" in release["publish-index"]
    assert "id-token: write" in release["publish-index"]
    assert "subject-digest: ${{ steps.push.outputs.digest }}" in release["image"]
    assert "needs: [build, test]" in release["image"]
    assert "needs: [build, test, test-aarch64, independent, image]" in release["publish-index"]


def test_the_release_is_built_in_the_pinned_image() -> None:
    """The compiler of its host code is then the same as in an independent rebuild."""
    base = re.search(r"^ARG BASE_BUILD=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert base is not None
    assert f"container: {base[1]}\n" in (ROOT / ".github" / "workflows" / "build.yml").read_text()


def results(**changes: str) -> dict[str, dict[str, str]]:
    every = {**dict.fromkeys(REQUIRED, "success"), "gpu": "success", **changes}
    return {job: {"result": result} for job, result in every.items()}


def test_a_gpu_without_a_runner_is_not_run_and_no_pass() -> None:
    report = check_jobs(results(), ["sm90"])
    assert report.verdict is Verdict.PASS
    verdicts = {check.name: check.verdict for check in report.checks}
    assert (verdicts["gpu"], verdicts["gpu sm80"]) == (Verdict.PASS, Verdict.SKIP)
    assert "gpu sm90" not in verdicts
    assert {check.name for check in check_jobs(results(gpu="skipped")).checks if check.verdict is Verdict.SKIP} == {
        "gpu", *(f"gpu {gpu.name}" for gpu in GPUS)
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"lint": "failure"}, {"test": "skipped"}, {"image": "cancelled"}, {"gpu": "failure"}, {"gpu": "cancelled"}],
)
def test_anything_else_than_success_fails_the_summary(changes: dict[str, str]) -> None:
    assert check_jobs(results(**changes)).verdict is Verdict.FAIL


def test_a_job_that_was_taken_away_fails_the_summary() -> None:
    needs = results()
    del needs["test"]
    assert check_jobs(needs).verdict is Verdict.FAIL


def test_the_summary_without_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="NEEDS must hold"):
        summary({})
    page = tmp_path / "page.md"
    assert summary({"NEEDS": json.dumps(results()), "GITHUB_STEP_SUMMARY": str(page)}) == 0
    assert "| gpu sm80 | SKIP | NOT RUN" in page.read_text()
