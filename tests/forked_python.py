"""Runs code in a separate process that has only imported torch: forked from one that waits for such work.

Importing torch takes an interpreter two seconds; a fork of a process that has imported it takes milliseconds. Code that tests the
import of torch or the end of a process needs a complete interpreter, and so does code that uses a GPU.
"""

import atexit
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SAFE_PATH = (
    ("-P",) if sys.version_info >= (3, 11) else ()
)  # older ones search the script's folder, or with -c the current one


def run_python(
    *words: str, environ: Mapping[str, str] | None = None, folder: Path | None = None, timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    """Equivalent to ``python -P WORDS``: ``-c CODE`` or a file, and arguments. ``environ``: added to this process's environment."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as elsewhere:
        job = {"words": words, "environ": {**os.environ, **(environ or {})}, "folder": str(folder or elsewhere)}
        job |= {name: str(Path(elsewhere) / name) for name in ("stdout", "stderr")}
        server.stdin.write(json.dumps(job).encode() + b"\n")
        if not select.select([server.stdout], [], [], timeout)[0]:
            os.killpg(server.pid, 9)
            _server.cache_clear()
            raise subprocess.TimeoutExpired(words, timeout)
        status = int(server.stdout.readline())
        texts = (Path(job[name]).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(words, status, *texts)


@cache
def _server() -> subprocess.Popen[bytes]:
    """The server ends with this process, which holds the other end of its input."""
    import flashmoe

    packages = str(Path(flashmoe.__file__).resolve().parents[1])  # after the installed ones
    command = [sys.executable, *SAFE_PATH, __file__, packages]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, start_new_session=True)


def _serve() -> list[str]:
    """Returns in a child, with its arguments; the parent exits when its input ends."""
    import torch  # noqa: F401

    while line := sys.stdin.readline():
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ.clear()
            os.environ.update(job["environ"])
            os.chdir(job["folder"])
            for number, name in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
                os.dup2(os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600), number)
            return list(job["words"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)


def _run(argv: list[str]) -> object:
    """The exit status of the process."""
    if argv[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        del argv[:2]
    sys.argv[:] = argv
    try:
        if argv[0] == "-c":
            exec(compile(argv[1], "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    if not SAFE_PATH:
        del sys.path[0]
    sys.path.append(sys.argv[1])
    status = _run(_serve())
    if isinstance(status, str):
        print(status, file=sys.stderr)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(1 if isinstance(status, str) else int(status or 0))  # shutting torch down would take most of the time
