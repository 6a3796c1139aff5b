"""``python -m flashmoe_build.gate.load``: reports whether the extension loads, and which GPU this machine has.

This is a separate process because a library that crashes takes its process with it.
"""

import argparse
from pathlib import Path

from flashmoe.errors import FlashmoeError
from flashmoe_tools.report import Check, Report, Verdict, host_environment, typed_command, utc_now, write_report


def load_check() -> Check:
    """Loads the library and looks up the operator."""
    try:
        from flashmoe import _extension

        _extension.load()
        import torch

        operator = torch.ops.flashmoe.flash_attention_forward.default
    except (FlashmoeError, AttributeError, OSError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error}"
        return Check("load", Verdict.FAIL, found, "the operator", next_step="python -m flashmoe doctor")
    return Check("load", Verdict.PASS, f"{operator._schema} under torch {torch.__version__}")


def gpu_facts() -> dict[str, str] | None:
    """Name and compute capability of the GPU that torch uses; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return {"name": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    path, started = parser.parse_args().json, utc_now()
    check = load_check()
    data = {"gpu": gpu_facts()} if check.verdict is Verdict.PASS else {}
    report = Report("load", (check,), data, host_environment(), typed_command("flashmoe_build.gate.load"), started)
    write_report(path, report)
    print(f"{check.verdict} {check.found}")
    return int(report.exit_code)


if __name__ == "__main__":
    raise SystemExit(main())
