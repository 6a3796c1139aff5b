"""CI's workflows: sessions that exist, jobs that the architecture table gives, pinned actions, a verdict that cannot flatter."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flashmoe.errors import ReportError
from flashmoe_build.release.workflows import BEGIN, PUSHED, REQUIRED, generated, judge, main, renewed, summary
from flashmoe_tools.report import Verdict
from flashmoe_tools.tables import load_tables

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
GPUS = tuple(load_tables(ROOT / "csrc").gpus)
SESSIONS = set(re.findall(r"^@nox\.session.*\ndef (\w+)\(", (ROOT / "noxfile.py").read_text(), re.MULTILINE))


def jobs_of(text: str) -> dict[str, str]:
    """{job: its text}; jobs are the keys that are indented by two below ``jobs:``."""
    body = text.split("\njobs:\n", 1)[1]
    parts = re.split(r"^  ([a-z][\w-]*):\n", body, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_there_are_workflows_and_sessions() -> None:
    assert {path.name for path in WORKFLOWS} >= {"ci.yml", "nightly.yml", "release.yml", "gpu.yml", "ratchet.yml"}
    assert {"build", "test", "image", "workflows"} <= SESSIONS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_calls_a_session_that_exists(path: Path) -> None:
    for name, text in jobs_of(path.read_text()).items():
        called = re.findall(r"\./nox -s ((?:\w+ ?)+)", text)
        if "uses: ./.github/workflows/" in text or name == PUSHED:  # which pushes what another job's session built
            assert not called
            continue
        assert called, f"{path.name}: {name} calls no session"
        words = {word for line in called for word in line.split()}
        assert words <= SESSIONS, f"{path.name}: {name} calls {words - SESSIONS}"


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


def test_the_generated_jobs_are_those_of_the_table() -> None:
    assert main(["--check"]) == 0
    for name in ("ci.yml", "nightly.yml"):
        text = (ROOT / ".github" / "workflows" / name).read_text()
        jobs = [job for job in jobs_of(text) if job.startswith("gpu-")]
        assert jobs == [f"gpu-{gpu.name}" for gpu in GPUS]


def test_a_new_architecture_makes_the_check_fail() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert renewed("ci.yml", text, GPUS) == text
    fewer = renewed("ci.yml", text, GPUS[:-1])
    assert fewer != text
    assert renewed("ci.yml", fewer, GPUS) == text
    assert f"gpu-{GPUS[-1].name}" not in generated("ci.yml", GPUS[:-1])
    with pytest.raises(ReportError, match="must hold the lines"):
        renewed("ci.yml", text.replace(BEGIN, ""), GPUS)


def test_the_summary_needs_every_job() -> None:
    jobs = jobs_of((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    match = re.search(r"needs: \[(.*)\]", jobs["ci"])
    assert match is not None
    assert set(match[1].split(", ")) == set(jobs) - {"ci"}
    assert "if: always()" in jobs["ci"]
    assert set(REQUIRED) <= set(jobs)


def test_only_pushes_write_to_the_registry_and_reach_gpus() -> None:
    """A pull request and a merge queue run neither with a token that may write, nor on GPUs without an image reference."""
    jobs = jobs_of((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert [name for name, text in jobs.items() if "packages: write" in text] == [PUSHED]
    assert "\n    if: github.event_name == 'push'" in "\n" + jobs[PUSHED]
    for name in (name for name in jobs if name.startswith("gpu-")):
        assert "    if: github.event_name == 'push' &&" in jobs[name]
        assert f"needs: {PUSHED}\n" in jobs[name]


def test_the_release_is_attested_where_it_is_built() -> None:
    """By a reusable workflow, whose identity its caller cannot take; no job of the release holds a password."""
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
    assert "needs: [build, test, test-aarch64, independent]" in release["publish-index"]


def test_the_release_is_built_in_the_pinned_image() -> None:
    """So that the compiler of its host part is the one that an independent rebuild has."""
    base = re.search(r"^ARG BASE_BUILD=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert base is not None
    assert f"container: {base[1]}\n" in (ROOT / ".github" / "workflows" / "build.yml").read_text()


def results(**changes: str) -> dict[str, dict[str, str]]:
    every = {**dict.fromkeys(REQUIRED, "success"), "gpu-sm80": "skipped", "gpu-sm90": "success", **changes}
    return {job: {"result": result} for job, result in every.items()}


def test_a_gpu_without_a_runner_is_not_run_and_no_pass() -> None:
    report = judge(results())
    assert report.verdict is Verdict.PASS
    verdicts = {check.name: check.verdict for check in report.checks}
    assert (verdicts["gpu-sm80"], verdicts["gpu-sm90"]) == (Verdict.SKIP, Verdict.PASS)
    assert next(check for check in report.checks if check.name == "gpu-sm80").found.startswith("NOT RUN")


@pytest.mark.parametrize(
    "changes",
    [
        {"lint": "failure"},
        {"test": "skipped"},
        {"image": "cancelled"},
        {"gpu-sm90": "failure"},
        {"gpu-sm80": "cancelled"},
    ],
)
def test_anything_else_than_success_fails_the_summary(changes: dict[str, str]) -> None:
    assert judge(results(**changes)).verdict is Verdict.FAIL


def test_a_job_that_was_taken_away_fails_the_summary() -> None:
    needs = results()
    del needs["test"]
    assert judge(needs).verdict is Verdict.FAIL


def test_the_summary_without_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="NEEDS must hold"):
        summary({})
    page = tmp_path / "page.md"
    assert summary({"NEEDS": json.dumps(results()), "GITHUB_STEP_SUMMARY": str(page)}) == 0
    assert "| gpu-sm80 | SKIP | NOT RUN" in page.read_text()
