"""CI's jobs for GPUs, generated from csrc/tables/arch.toml, and the verdict over all of CI's jobs.

    nox -s workflows                  # write the generated jobs into .github/workflows (-- --check: compare only)
    nox -s ci_summary                 # the one required job: reads the results of all others from NEEDS

One job per GPU architecture, on a runner labelled with its name. The repository variable GPU_RUNNERS, a JSON list such as
["sm80", "sm90"], says which architectures have a runner: the job of any other is skipped by the platform, shown as skipped
and listed here as NOT RUN. A job that did nothing never counts as passed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashmoe.errors import ExitCode, ReportError
from flashmoe_build.program import ROOT, Stopwatch, ending, finish
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.tables import Gpu, load_tables

FOLDER = ROOT / ".github" / "workflows"
BEGIN = "  # generated from csrc/tables/arch.toml by `nox -s workflows`: begin\n"
END = "  # generated: end\n"
GPU_PREFIX = "gpu-"
# Jobs of ci.yml that must have succeeded; those of GPUs may be skipped.
REQUIRED = ("lint", "build", "test", "reproduce", "compat", "image")
PUSHED = "push-image"  # on pushes only: nothing else may write to the registry, and GPUs test what was pushed

GPU_JOB = """\
  gpu-{name}:
    name: {name} ({products})
    if: github.event_name == 'push' && contains(fromJSON(vars.GPU_RUNNERS || '[]'), '{name}')
    needs: push-image
    permissions:
      contents: read
      packages: read
    uses: ./.github/workflows/gpu.yml
    with:
      gpu: {name}
      image: ${{{{ needs.push-image.outputs.reference }}}}
"""
RATCHET_JOB = """\
  gpu-{name}:
    name: ratchet {name} ({products})
    if: contains(fromJSON(vars.GPU_RUNNERS || '[]'), '{name}')
    permissions:
      contents: read
    uses: ./.github/workflows/ratchet.yml
    with:
      gpu: {name}
"""
SUMMARY_JOB = """\
  ci:
    name: ci
    if: always()
    needs: [{needs}]
    permissions:
      contents: read
    runs-on: ubuntu-24.04
    timeout-minutes: 10
    steps:
      - uses: {checkout}
        with:
          persist-credentials: false
      - run: ./nox -s ci_summary
        env:
          NEEDS: ${{{{ toJSON(needs) }}}}
"""
CHECKOUT = "actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd # v6.0.2"


def generated(name: str, gpus: Sequence[Gpu]) -> str:
    """The generated part of one workflow."""
    template = GPU_JOB if name == "ci.yml" else RATCHET_JOB
    jobs = [template.format(name=gpu.name, products=gpu.products) for gpu in gpus]
    if name == "ci.yml":
        needs = ", ".join([*REQUIRED, PUSHED, *(GPU_PREFIX + gpu.name for gpu in gpus)])
        jobs.append(SUMMARY_JOB.format(needs=needs, checkout=CHECKOUT))
    return "\n".join(jobs)


def renewed(name: str, text: str, gpus: Sequence[Gpu]) -> str:
    """A workflow's text with its generated part replaced. Raises ReportError if the markers are missing."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        msg = f"{name} must hold the lines {BEGIN.strip()!r} and {END.strip()!r} once each"
        raise ReportError(msg)
    head, rest = text.split(BEGIN)
    return head + BEGIN + generated(name, gpus) + END + rest.split(END)[1]


def judge(needs: Mapping[str, Mapping[str, object]]) -> Report:
    """The verdict over a workflow's jobs, from the platform's `needs` context."""
    checks = []
    for job, state in needs.items():
        result = str(state.get("result"))
        if result == "success":
            checks.append(Check(job, Verdict.PASS, result))
        elif result == "skipped" and job == PUSHED:
            checks.append(Check(job, Verdict.SKIP, "NOT RUN: only a push to main pushes the image"))
        elif result == "skipped" and job.startswith(GPU_PREFIX):
            found = "NOT RUN: no runner for this architecture (GPU_RUNNERS), or no push to main"
            checks.append(
                Check(job, Verdict.SKIP, found, next_step="label a self-hosted runner and add it to GPU_RUNNERS")
            )
        else:
            checks.append(Check(job, Verdict.FAIL, result, "success"))
    missing = [job for job in REQUIRED if job not in needs]
    checks += [Check(job, Verdict.FAIL, "not among the jobs", "success") for job in missing]
    return Stopwatch().report("ci", checks)


def markdown(report: Report) -> str:
    rows = [f"| {check.name} | {check.verdict} | {check.found} |" for check in report.checks]
    return "\n".join(["| job | verdict | |", "|---|---|---|", *rows, ""])


def summary(environment: Mapping[str, str]) -> int:
    """Print and record the verdict; the table also goes to the platform's summary page."""
    try:
        needs = json.loads(environment.get("NEEDS", ""))
    except ValueError as error:
        msg = "NEEDS must hold the results of CI's jobs as JSON; this session is for CI's last job"
        raise ReportError(msg) from error
    report = judge(needs)
    code = finish(report)
    print(markdown(report))
    if environment.get("GITHUB_STEP_SUMMARY"):
        with Path(environment["GITHUB_STEP_SUMMARY"]).open("a", encoding="utf-8") as stream:
            stream.write(markdown(report))
    return code


def update(folder: Path, *, check: bool) -> int:
    """Write the generated parts, or compare them."""
    gpus = tuple(load_tables(ROOT / "csrc").gpus)
    stale = []
    for name in ("ci.yml", "nightly.yml"):
        path = folder / name
        text = path.read_text(encoding="utf-8")
        new = renewed(name, text, gpus)
        if new != text:
            stale.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale and check:
        print(f"{', '.join(stale)}: does not match csrc/tables/arch.toml; run `nox -s workflows`", file=sys.stderr)
        return ExitCode.FAILED
    print(f"wrote {', '.join(stale)}" if stale else "the workflows match csrc/tables/arch.toml")
    return ExitCode.OK


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flashmoe_build.release.workflows", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--summary", action="store_true", help="judge the jobs in NEEDS")
    options = parser.parse_args(arguments)
    return ending(lambda: summary(os.environ) if options.summary else update(FOLDER, check=options.check))


if __name__ == "__main__":
    raise SystemExit(main())
