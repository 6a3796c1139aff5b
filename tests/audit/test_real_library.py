"""The library of this test session: FLASHMOE_LIBRARY, the installed package's, or the checkout's build/lib."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
from audit_builders import SITE, audit, failures, run

from flashmoe_tools.audit.elf import open_elf, read_bytes, section_data
from flashmoe_tools.audit.embedded import BINARY_SECTION, read_embedded
from flashmoe_tools.report import Verdict

NVDISASM = SITE / "triton" / "backends" / "nvidia" / "bin" / "nvdisasm"  # comes with triton, which torch installs


def session_library() -> Path | None:
    """The library that this session names; an error if it is missing, not a reason to skip."""
    stated = os.environ.get("FLASHMOE_LIBRARY")
    if stated:
        assert Path(stated).is_file(), f"FLASHMOE_LIBRARY={stated} is no file"
        return Path(stated)
    spec = importlib.util.find_spec("flashmoe")
    assert spec is not None
    places = [Path(folder) / "libflashmoe.so" for folder in spec.submodule_search_locations or []]
    found = next((path for path in places if path.is_file()), None)
    if os.environ.get("FLASHMOE_TEST_INSTALLED") == "1":
        assert found is not None, "an installed flashmoe is under test, but it has no libflashmoe.so"
    return found


@pytest.mark.slow
def test_library_of_this_session_is_proved() -> None:
    library = session_library()
    if library is None:
        pytest.skip(
            "no library in this session: neither FLASHMOE_LIBRARY nor an installed flashmoe (`nox -s build` gives one)"
        )
    report = audit(library)
    assert not failures(report), "\n".join(f"{c.name}: {c.found}; {c.why}" for c in failures(report))
    assert report.verdict in (Verdict.PASS, Verdict.WARN)
    subject = report.data["subjects"][0]
    assert subject["ours"] is True


def loops(listing: str) -> list[list[str]]:
    """The instructions of each loop of nvdisasm's listing."""
    code: list[str] = []
    labels: dict[str, int] = {}
    found = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif re.search(r"/\*[0-9a-f]{4,}\*/\s+\S", line):
            code.append(line)
            branch = re.search(r"BRA\b.*`\((\.L_x_\d+)\)", line)
            if branch and branch[1] in labels:  # a backward branch
                found.append(code[labels[branch[1]] :])
    return found


def test_plain_loops_of_ragged_prefill_reuse_their_operands(tmp_path: Path) -> None:
    """The plain loops reuse at least as many operands as in today's kernels.

    See docs/notebook/2026-11-23-attention-ragged.md, "Registers of the plain loop": code elsewhere in the kernel moves
    the loop's registers. Before keys ascended the counts were 42, 92 and 154.
    """
    library = session_library()
    if library is None:
        pytest.skip("no library in this session")
    blob = section_data(open_elf(read_bytes(library), library.name), BINARY_SECTION)
    assert blob is not None
    places = {one.label: slice(one.offset, one.offset + one.size) for one in read_embedded(library)}
    least = {64: 16, 128: 80, 256: 152}
    names = {f"attention_varlen_forward_sm90_{dtype}_d{dim}.sm_90a": dim for dtype in ("f16", "bf16") for dim in least}
    if not names.keys() <= places.keys():
        pytest.skip("this session's library has no sm_90a")
    cubin = tmp_path / "kernel.cubin"
    for name, dim in names.items():
        cubin.write_bytes(blob[places[name]])
        multiplying = [loop for loop in loops(run([str(NVDISASM), "-c", str(cubin)])) if "HGMMA" in "".join(loop)]
        plain = min(multiplying, key=len)
        assert sum(line.count(".reuse") for line in plain) >= least[dim], name
