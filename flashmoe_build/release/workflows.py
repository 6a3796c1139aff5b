"""The verdict over all CI jobs, for the single required job, and the check that it covers every job.

    nox -s ci_summary                 # reads the results of the other jobs from NEEDS
    nox -s workflows                  # checks that the summary waits for every job of ci.yml

The repository variable GPU_RUNNERS, a JSON list such as ["sm80", "sm90"], lists the GPU architectures that have a runner with
that label. Others are listed as NOT RUN: a job that did nothing never counts as passed.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashmoe.errors import ExitCode, ReportError
from flashmoe_build.program import ROOT, Stopwatch, ending, finish
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.tables import load_tables
from flashmoe_tools.toml import tomllib

MARKS = ROOT / "docs" / "results"
CI = ROOT / ".github" / "workflows" / "ci.yml"
GPU = "gpu"
BEFORE_MERGE = "gpu-wheel"  # on GPUs, too: in the merge queue, and once each time that a pull request is labelled gpu
PUSHED = "push-image"  # on pushes only: nothing else may write to the registry; GPUs test what was pushed
# Jobs of ci.yml that must succeed; GPU jobs may be skipped.
REQUIRED = ("lint", "build", "test", "reproduce", "compat", "image")
SUMMARY = "ci"
NOT_RUN: Mapping[str, str] = {
    PUSHED: "NOT RUN: only a push to main pushes the image",
    GPU: "NOT RUN: only a push to main tests the image on GPUs, those of GPU_RUNNERS",
    BEFORE_MERGE: "NOT RUN: only the merge queue and the label gpu test the wheel on GPUs, those of GPU_RUNNERS",
}


def check_jobs(needs: Mapping[str, Mapping[str, object]], runners: Sequence[str] = ()) -> Report:
    """The verdict over a workflow's jobs, from the platform's `needs` context. ``runners``: architectures with a runner."""
    checks = []
    for job, state in needs.items():
        result = str(state.get("result"))
        if result == "success":
            checks.append(Check(job, Verdict.PASS, result))
        elif result == "skipped" and job in (PUSHED, GPU, BEFORE_MERGE):
            found = NOT_RUN[job]
            checks.append(Check(job, Verdict.SKIP, found))
        else:
            checks.append(Check(job, Verdict.FAIL, result, "success"))
    step = "label a self-hosted runner and add it to GPU_RUNNERS"
    lacking = [gpu.name for gpu in load_tables(ROOT / "csrc").gpus if gpu.name not in runners]
    checks += [Check(f"{GPU} {name}", Verdict.SKIP, "NOT RUN: no runner", next_step=step) for name in lacking]
    missing = [job for job in REQUIRED if job not in needs]
    checks += [Check(job, Verdict.FAIL, "not among the jobs", "success") for job in missing]
    return Stopwatch().report("ci", checks)


def markdown(report: Report) -> str:
    rows = [f"| {check.name} | {check.verdict} | {check.found} |" for check in report.checks]
    return "\n".join(["| job | verdict | |", "|---|---|---|", *rows, ""])


def summary(environment: Mapping[str, str]) -> int:
    """Print and record the verdict; the table is also written to the platform's summary page."""
    try:
        needs, runners = json.loads(environment.get("NEEDS", "")), json.loads(environment.get("GPU_RUNNERS") or "[]")
    except ValueError as error:
        msg = "NEEDS must hold the results of CI's jobs as JSON, GPU_RUNNERS a list; this session is for CI's last job"
        raise ReportError(msg) from error
    report = check_jobs(needs, runners)
    code = finish(report)
    print(markdown(report))
    if environment.get("GITHUB_STEP_SUMMARY"):
        with Path(environment["GITHUB_STEP_SUMMARY"]).open("a", encoding="utf-8") as stream:
            stream.write(markdown(report))
    return code


def marked(environment: Mapping[str, str], folder: Path = MARKS) -> int:
    """Write the architectures that have both a runner and marks to the step's outputs, as ``gpus``."""
    runners = json.loads(environment.get("GPU_RUNNERS") or "[]")
    files = (tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("ratchet-*.toml")))
    known = {str(marks.get("arch")) for marks in files}
    line = f"gpus={json.dumps([name for name in runners if name in known])}"
    print(line)
    if environment.get("GITHUB_OUTPUT"):
        with Path(environment["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")
    return ExitCode.OK


def jobs_of(text: str) -> dict[str, str]:
    """{job: its text} of a workflow; jobs are the keys indented by two spaces below ``jobs:``."""
    body = text.split("\njobs:\n", 1)[1]
    parts = re.split(r"^  ([a-z][\w-]*):.*\n", body, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def check(text: str) -> int:
    """Whether the summary waits for every other job of ci.yml."""
    jobs = jobs_of(text)
    waits = re.search(r"needs: \[(.*)\]", jobs.pop(SUMMARY, ""))
    left = set(jobs) ^ set(waits[1].split(", ") if waits else ())
    if left:
        print(f"ci.yml: job {SUMMARY} must need every job and no other: {', '.join(sorted(left))}", file=sys.stderr)
        return ExitCode.FAILED
    print(f"ci.yml: job {SUMMARY} needs all of {len(jobs)} jobs")
    return ExitCode.OK


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_build.release.workflows", description=__doc__
    )
    parser.add_argument("--check", action="store_true", help="the default: look at ci.yml")
    parser.add_argument("--summary", action="store_true", help="judge the jobs in NEEDS")
    parser.add_argument("--marked", action="store_true", help="list the GPUs that have a runner and marks to keep")
    options = parser.parse_args(arguments)
    if options.marked:
        return ending(lambda: marked(os.environ))
    return ending(lambda: summary(os.environ) if options.summary else check(CI.read_text(encoding="utf-8")))


if __name__ == "__main__":
    raise SystemExit(main())
