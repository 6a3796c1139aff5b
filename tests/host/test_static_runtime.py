"""If g++ has libstdc++ only as an archive, our library contains a copy, beside torch's in the same process.

``std::num_put::id`` and the like are unique in a process, locales are not: if the archive's symbols are visible to
others, the wrong facet writes a number in an error, which is lost or crashes.
"""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from flashmoe_build.compile.host import COMMON_FLAGS, LINK_FLAGS
from flashmoe_build.compile.toolchain import find_toolchain

SOURCE = """
#include <sstream>
#include <string>
extern "C" __attribute__((visibility("default"))) const char* text(long number) {
  static std::string kept;
  std::ostringstream stream{std::ios_base::out};
  stream << "grid " << number << ", scale " << 0.5;
  kept = stream.str();
  return kept.c_str();
}
"""


@pytest.mark.parametrize("runtime", ["-shared-libgcc", "-static-libstdc++"])
def test_numbers_in_errors_are_written_by_the_librarys_own_runtime(tmp_path: Path, runtime: str) -> None:
    assert torch.__version__  # loads its libstdc++ first
    (tmp_path / "text.cpp").write_text(SOURCE)
    path, flags = tmp_path / "text.so", [flag for flag in LINK_FLAGS if not flag.startswith("-Wl,-soname")]
    command = [find_toolchain().cxx, *COMMON_FLAGS, *flags, runtime, str(tmp_path / "text.cpp"), "-o", str(path)]
    subprocess.run(command, check=True, timeout=120)
    library = ctypes.CDLL(str(path))
    library.text.restype = ctypes.c_char_p
    assert library.text(ctypes.c_long(65535)) == b"grid 65535, scale 0.5"
