"""One NVRTC compilation in a separate process, so that its memory can be measured and is returned.

Reads a job on standard input: {"library", "source", "name", "options"}; writes an answer on standard output:
{"status", "log", "output" (the PTX), "seconds", "peak_bytes"}. Both use marshal, which is built into the interpreter: a build starts
hundreds of these processes, and importing json and typing took as long as everything else before the compilation.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import sys
import time

TYPE_CHECKING = False  # typing.TYPE_CHECKING without the import
if TYPE_CHECKING:
    from typing import Any


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, size_call: str, get_call: str) -> str:
    size = ctypes.c_size_t()
    if getattr(library, size_call)(program, ctypes.byref(size)) != 0:
        return ""
    buffer = ctypes.create_string_buffer(size.value)
    raw = buffer.raw if getattr(library, get_call)(program, buffer) == 0 else b""
    return raw.rstrip(b"\0").decode(errors="replace")


def compile_job(job: dict[str, Any]) -> dict[str, Any]:
    library = ctypes.CDLL(job["library"])
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()
    started = time.monotonic()
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), job["source"].encode(), job["name"].encode(), 0, None, None
    )
    options = [option.encode() for option in job["options"]]
    if status == 0:
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    return {
        "status": "ok" if status == 0 else library.nvrtcGetErrorString(status).decode(),
        "log": _text(library, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog"),
        "output": _text(library, program, "nvrtcGetPTXSize", "nvrtcGetPTX") if status == 0 else "",
        "seconds": time.monotonic() - started,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    marshal.dump(compile_job(marshal.load(sys.stdin.buffer)), sys.stdout.buffer)
    sys.stdout.buffer.flush()
    os._exit(0)  # unloading the library would take 9 ms
