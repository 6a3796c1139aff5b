"""c++filt: demangles names in batches."""

import shutil
import subprocess
from collections.abc import Iterable

TIMEOUT_SECONDS = 120


def demangle(names: Iterable[str]) -> dict[str, str]:
    """Maps each mangled C++ name to its demangled form. Without c++filt a name is kept and marked as mangled."""
    result = {name: name for name in names}
    mangled = [name for name in result if name.startswith("_Z")]
    if not mangled:
        return result
    tool = shutil.which("c++filt")
    if tool is None:
        return {**result, **{name: f"{name} (mangled: c++filt is not installed)" for name in mangled}}
    run = subprocess.run(
        [tool],
        input="\n".join(mangled),
        capture_output=True,
        text=True,
        check=False,
        errors="backslashreplace",
        timeout=TIMEOUT_SECONDS,
    )
    lines = run.stdout.splitlines()
    if run.returncode or len(lines) != len(mangled):
        return {**result, **{name: f"{name} (mangled: c++filt failed)" for name in mangled}}
    return {**result, **dict(zip(mangled, lines, strict=True))}
