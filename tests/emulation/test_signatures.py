"""The emulated wrappers match the real ones: same headers, same signatures."""

from pathlib import Path

import pytest

from flashmoe_build.emulation.build import CSRC
from flashmoe_build.emulation.signatures import functions

REAL = CSRC / "ptx"
EMULATED = CSRC / "emulation" / "include" / "ptx"
# Plain C++ that both builds share.
SHARED = {"elements.cuh", "types.cuh"}


def wrapper_headers() -> list[str]:
    return sorted(path.name for path in REAL.glob("*.cuh") if path.name not in SHARED)


def test_every_wrapper_header_is_emulated() -> None:
    assert len(wrapper_headers()) >= 10
    missing = [name for name in wrapper_headers() if not (EMULATED / name).is_file()]
    assert not missing, f"no emulation of csrc/ptx/{missing}; docs/emulation.md says how to add one"


def test_nothing_is_emulated_that_does_not_exist() -> None:
    extra = {path.name for path in EMULATED.glob("*.cuh")} - {path.name for path in REAL.glob("*.cuh")}
    assert not extra


@pytest.mark.parametrize("name", wrapper_headers())
def test_signatures_agree(name: str) -> None:
    real, emulated = functions(REAL / name), functions(EMULATED / name)
    assert real, f"no device function was read from csrc/ptx/{name}"
    assert emulated == real


def test_a_changed_signature_is_noticed(tmp_path: Path) -> None:
    text = (EMULATED / "barrier.cuh").read_text(encoding="utf-8")
    changed = tmp_path / "barrier.cuh"
    changed.write_text(text.replace("int id, int threads", "int threads, int id", 1), encoding="utf-8")
    assert functions(changed) != functions(REAL / "barrier.cuh")
