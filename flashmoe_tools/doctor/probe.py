"""Imports torch, loads the extension and runs the smallest problems; prints JSON after each step, to locate a crash.

Run by the doctor in a separate process, with the import path of the doctor's own interpreter.
"""

import json


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main(has_extension: bool) -> int:
    from flashmoe.errors import FlashmoeError
    from flashmoe_tools.report import Verdict

    try:
        import torch

        say(torch=str(torch.__version__), cuda=str(torch.version.cuda or ""))
        say(nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "")
    except Exception as error:  # a damaged torch may raise anything
        say(problem=f"{type(error).__name__}: {error}")
        return 1
    if not has_extension:
        return 0
    try:
        from flashmoe import _extension

        _extension.load()
        binaries = _extension.index().get("binaries", [])
        say(loaded=True, targets=sorted({str(item["target"]) for item in binaries}))
    except (ImportError, OSError, RuntimeError, FlashmoeError) as error:
        say(loaded=False, load_error=f"{type(error).__name__}: {error}")
        return 1
    from flashmoe_tools.smoke import QUICK_LENGTHS, RAISED, run

    report = run(QUICK_LENGTHS)
    failed = [check for check in report.checks if check.verdict is Verdict.FAIL]
    passed = [check for check in report.checks if check.verdict is Verdict.PASS]
    text = f"{failed[0].name}: {failed[0].found}" if failed else f"{len(passed)} problems correct, {passed[-1].found}"
    say(smoke=text, smoke_ok=not failed, smoke_raised=bool(failed) and failed[0].why == RAISED)
    return 0
