"""``nox -s history``: the gate's result for each commit, and the last known good of each architecture.

One JSON line per run of the gate in ``docs/results/history/<architecture>.jsonl``; ``gate --record`` appends, nothing is rewritten.
"""

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmoe.errors import ExitCode, ReportError
from flashmoe_tools.report import Report, Verdict, built_commit

SCHEMA = "flashmoe.history/1"
FOLDER = Path("docs") / "results" / "history"


def record_of(report: Report, root: Path, library: Path | None = None) -> dict[str, Any]:
    """The record of a gate report. Outside git the commit is the one that ``library`` was built from."""
    gpu = report.data.get("gpu")
    return {
        "schema": SCHEMA,
        "commit": commit_of(root) or (built_commit(library) if library else ""),
        "started": report.started,
        "architecture": "sm" + gpu["capability"].replace(".", "") if gpu else "cpu",
        "device": gpu["name"] if gpu else report.environment.get("processor", ""),
        "verdict": report.verdict.value,
        "stopped_at": report.data["stopped_at"],
        "known_good": report.data["known_good"],
        "seconds": round(report.seconds, 1),
        "cost": round(report.data["cost"], 4),
        "ratios": {
            f"{row['subject']} / {row['baseline']}": round(row["geometric_mean"], 4)
            for row in report.data["aggregates"]
        },
    }


def commit_of(root: Path) -> str:
    """The checked-out commit, with ``+`` appended if files differ from it; empty outside git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "HEAD")
    return commit + ("+" if commit and git("status", "--porcelain", "--untracked-files=no") else "")


def append_record(folder: Path, record: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['architecture']}.jsonl"
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record, sort_keys=True) + "\n")
    return path


def read_history(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Records by architecture, in the order they were taken. Raises ReportError with the file and line of a damaged one."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                record = json.loads(line)
                if record["schema"] != SCHEMA:
                    raise KeyError(record["schema"])
            except (ValueError, KeyError, TypeError) as error:
                msg = f"{path.name} line {number} is not a record of {SCHEMA}: {error!r}"
                raise ReportError(msg) from error
            found.setdefault(path.stem, []).append(record)
    return found


def last_known_good(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The newest record without a failure that calls something known good and was taken on committed files."""
    good = [record for record in records if not why_not_good(record)]
    return max(good, key=lambda record: str(record["started"]), default=None)


def why_not_good(record: Mapping[str, Any]) -> str:
    """Why this run does not make its commit known good; empty if it does."""
    if record["verdict"] not in (Verdict.PASS.value, Verdict.WARN.value):
        return f"stopped at {record['stopped_at']}" if record["stopped_at"] else "failed"
    if not record["known_good"]:
        return "without a PASS of the emulation"
    if not record["commit"]:
        return "of an unknown commit"
    return "files differed from the commit (+)" if record["commit"].endswith("+") else ""


def render(history: Mapping[str, Sequence[Mapping[str, Any]]], limit: int) -> str:
    lines = []
    for architecture, records in history.items():
        good = last_known_good(records)
        words = f"{good['commit'][:12]} of {good['started']}" if good else "none, see the right-hand column"
        lines.append(f"{architecture}: last known good {words}")
        for record in records[-limit:]:
            ratios = ", ".join(f"{name} {value:.3f}x" for name, value in record["ratios"].items())
            mark = "*" if record is good else " "
            commit = record["commit"][:12] + ("+" if record["commit"].endswith("+") else "")
            where = f"stopped at {record['stopped_at']}" if record["stopped_at"] else ratios or "no ratio"
            reason = "" if record["stopped_at"] else why_not_good(record)
            lines.append(
                f" {mark} {commit:<13}  {record['started']}  {record['verdict']:<4}  {where}"
                + (f"; not known good: {reason}" if reason else "")
            )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help=f"default: {FOLDER}")
    parser.add_argument("--last", type=int, default=20, metavar="N", help="records shown for each architecture")


def run(args: argparse.Namespace) -> int:
    history = read_history(args.folder)
    if not history:
        print(f"no history in {args.folder}; `./nox -s gate -- --record {args.folder}` begins one")
        return ExitCode.NOTHING_CHECKED
    print(render(history, args.last))
    return ExitCode.OK
