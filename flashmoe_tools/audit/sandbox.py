"""A child that may only read: it closes itself in, then becomes the loader.

Run as a file, ``python -I -S sandbox.py PROGRAM ARGUMENT...``, with the loader's environment in variables that begin with
``SANDBOX_``. A seccomp filter leaves the system calls that mapping a library takes: files can be opened for reading only,
there is no socket, no new process, no signal to another one. The filter holds through execve and cannot be taken off, so
it also holds for code that a malicious file might make the loader run. Every other call returns ENOSYS.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

REFUSED = 120  # exit code: the filter could not be set, and nothing was loaded
PREFIX = "SANDBOX_"
CPU_SECONDS = 30
ADDRESS_SPACE = 64 << 30  # the libraries of torch and CUDA map about 5 GB
OUTPUT = 1 << 20  # bytes; standard output is a file

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # prctl
_X86_64 = 0xC000003E  # AUDIT_ARCH_X86_64
_ALLOW, _KILL, _NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050000 | 38  # ENOSYS
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ARCHITECTURE, _NUMBER, _THIRD_ARGUMENT = 4, 0, 32  # offsets in struct seccomp_data
_OPENAT = 257
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READING = (
    *(0, 1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 17, 20, 21),  # read ... access: files, memory, own signal handlers
    *(28, 59, 60, 63, 79, 89, 158, 202, 218, 231),  # madvise, execve, exit, uname, getcwd, ..., futex, exit_group
    *(262, 267, 269, 273, 318, 332, 334, 439),  # newfstatat, readlinkat, faccessat, ..., getrandom, statx, rseq
)


def filter_program() -> bytes:
    """The filter as instructions of struct sock_filter: code, jump if true, jump if false, value."""
    rows = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for number in _READING:
        rows += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    rows += [
        *((_JUMP_EQUAL, 0, 3, _OPENAT), (_LOAD, 0, 0, _THIRD_ARGUMENT)),
        *((_JUMP_ANY_BIT, 1, 0, _WRITING), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NO_SUCH_CALL)),
    ]
    return b"".join(struct.pack("<HBBI", *row) for row in rows)


def close_in() -> None:
    """Set limits and the filter. Raises OSError where the kernel refuses."""
    for limit, most in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, ADDRESS_SPACE),
        (resource.RLIMIT_FSIZE, OUTPUT),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    libc = ctypes.CDLL(None, use_errno=True)
    program = filter_program()
    held = ctypes.create_string_buffer(program)
    described = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(held))  # struct sock_fprog
    for arguments in ((_NO_NEW_PRIVILEGES, 1, None), (_SET_SECCOMP, _FILTER, described)):
        if libc.prctl(*arguments, None, None) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def main(words: list[str]) -> int:
    environment = {key[len(PREFIX) :]: value for key, value in os.environ.items() if key.startswith(PREFIX)}
    try:
        close_in()
        os.execve(words[0], words, environment)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
