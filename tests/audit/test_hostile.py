"""Wheels and names made to exhaust, forge or confuse, and output streams that cannot show them."""

import io
import zipfile
from pathlib import Path

import pytest
from audit_builders import Row, Workshop, audit, failures, named, package_files

from flashmoe_tools.audit import inputs
from flashmoe_tools.audit.render import plain, show
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.tables import Tables

NAME = "science-1.0-cp311-cp311-linux_x86_64.whl"


@pytest.fixture(scope="module")
def files(workshop: Workshop) -> dict[str, bytes | str]:
    library = workshop.extension({"bind.cpp": 'extern "C" int PyInit__C() { return 1; }'})
    return {"science/__init__.py": "from . import _C\n", "science/_C.so": library.read_bytes()}


def test_many_members_share_one_budget(workshop: Workshop, files: dict[str, bytes | str]) -> None:
    """Each member is far below every limit; together they are a zip bomb."""
    bomb = {f"science/part{n}.txt": b"\0" * (1 << 20) for n in range(24)}
    check = named(audit(workshop.wheel({**files, **bomb}, name=NAME)), "input: damaged wheel")
    assert "its members unpack from" in check.found


def test_text_in_memory_has_a_budget(
    workshop: Workshop, files: dict[str, bytes | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = workshop.wheel({**files, **{f"science/m{n}.py": "x = 1\n" * 100 for n in range(9)}}, name=NAME)
    assert not failures(audit(path))
    monkeypatch.setattr(inputs, "MAX_TEXT", 5000)
    assert "more than 5000 bytes of Python" in named(audit(path), "input: damaged wheel").found


def test_large_data_is_read_in_pieces(
    workshop: Workshop, files: dict[str, bytes | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RECORD is checked without ever holding a complete member in memory."""
    path = workshop.wheel({**files, "science/data.bin": bytes(range(256)) * 4096}, name=NAME)

    def refuse(self: zipfile.ZipFile, name: str) -> bytes:
        raise AssertionError(f"{name} was read whole")

    monkeypatch.setattr(zipfile.ZipFile, "read", refuse)
    monkeypatch.setattr(inputs, "PIECE", 4096)
    assert not [c for c in failures(audit(path)) if "record" in c.name or "input" in c.name]


def test_two_metadata_folders(workshop: Workshop, files: dict[str, bytes | str]) -> None:
    path = workshop.wheel({**files, "other-1.0.dist-info/METADATA": "Name: other\n"}, name=NAME)
    assert "several .dist-info folders" in named(audit(path), "input: damaged wheel").found


def test_a_name_cannot_forge_a_line(workshop: Workshop, files: dict[str, bytes | str]) -> None:
    forged = "science/x\nPASS  wheel record: 9 members, every sha256 matches\n\x1b[2K\u202e.txt"
    report = audit(workshop.wheel({**files, forged: "x"}, name=NAME, record=lambda text: text.split("science/x")[0]))
    lines = "\n".join(plain(report)).splitlines()
    assert named(report, "wheel record")
    assert not [line for line in lines if line.startswith("PASS  wheel record: 9")]
    assert not [c for line in lines for c in line if not c.isprintable()]
    assert r"science/x\nPASS" in "\n".join(lines)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    show(report, stream)
    assert "\u202e" not in stream.getvalue()
    assert "\x1b[2K" not in stream.getvalue()


def test_an_ascii_log_shows_other_names() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    show(Report("audit", (Check("größe", Verdict.FAIL, "naïve", "x", "why", "next"),)), stream)
    assert rb"gr\xf6\xdfe" in raw.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        '{"schema": 3}',
        '{"schema": "flashmoe.provenance/1", "extension_sha256": [], "binaries": []}',
        '{"schema": "flashmoe.provenance/1", "extension_sha256": "", "binaries": {"name": 1}}',
        '{"schema": "flashmoe.provenance/1", "extension_sha256": "", "binaries": [7]}',
        '{"schema": "flashmoe.provenance/1", "extension_sha256": "", "binaries": [{"name": [], "target": {}, "sha256": 1}]}',
        '{"schema": "flashmoe.provenance/1", "extension_sha256": "", "targets": [["sm_80"]], "binaries": []}',
        "\0",
    ],
)
def test_a_provenance_of_other_types(
    workshop: Workshop, rows: tuple[Row, ...], sound: Path, tables: Tables, text: str
) -> None:
    path = workshop.wheel({**package_files(sound), "flashmoe/provenance.json": text})
    assert named(audit(path, tables=tables), "provenance").found == "no readable provenance.json"


@pytest.mark.parametrize("member", ["WHEEL", "RECORD"])
@pytest.mark.parametrize(
    "content", [b"\xff\xfe\0", b"\0" * 100, b"Tag: \n\n", b'"'], ids=["bytes", "NUL", "empty", "quote"]
)
def test_metadata_that_nobody_wrote(
    workshop: Workshop, files: dict[str, bytes | str], member: str, content: bytes
) -> None:
    path = workshop.wheel(files, name=NAME)
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, content if name.endswith(f".dist-info/{member}") else data)
    assert failures(audit(path))
