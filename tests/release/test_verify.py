"""`python -m flashmoe verify`: every kind of tampering with a wheel is found, and nothing that the wheel states can hide it."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from release_builders import (
    KERNEL,
    PACKAGE,
    VERSION,
    Row,
    Workshop,
    checked,
    clone_of,
    git,
    only_failure,
    package_of,
    problems,
    provenance_of,
    version_here,
)

from flashmoe.__main__ import main
from flashmoe.errors import ExitCode
from flashmoe_tools.report import Verdict
from flashmoe_tools.verify.cli import Request, verify
from flashmoe_tools.verify.content import read_wheel
from flashmoe_tools.verify.errors import VerifyError
from flashmoe_tools.verify.files import LINKS, printable
from flashmoe_tools.verify.metadata import wheel_sources
from flashmoe_tools.verify.rebuild import build_environment, compare
from flashmoe_tools.verify.repository import find_clone

WheelMaker = Callable[..., Path]
# A build without targets leaves one byte instead of the binaries.
CPU_ONLY = """
__asm__(".section .flashmoe.cubins,\\"a\\",@progbits\\n.byte 0\\n.previous");
extern "C" int flashmoe_cpu_isa() { return 0; }
"""
COMPARED = {
    "wheel record",
    "provenance",
    "platform and host compiler",
    "commit",
    "lock files",
    "name and version",
    "files",
    "metadata",
    "bill of materials",
}


def test_a_sound_wheel_passes_and_says_what_was_not_checked(
    make_wheel: WheelMaker, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = make_wheel()
    report = checked(wheel, clone)
    assert problems(report) == []
    assert {check.name for check in report.checks if check.verdict is Verdict.PASS} == COMPARED
    assert set(report.data["binaries"]) == {"attention_f16.sm_80", "attention_bf16.sm_80"}
    assert 0.0 <= report.seconds < 600.0
    assert main(["verify", str(wheel), "--root", str(clone)]) == 0
    message = capsys.readouterr().out
    assert "not checked  rebuilt wheel: not requested: the compiled library" in message
    assert message.rstrip().endswith("not checked: rebuilt wheel, signature")


def test_an_edited_device_binary(make_wheel: WheelMaker, library: bytes, clone: Path) -> None:
    edited = library.replace(KERNEL, b"\x7fELF bf17 ", 1)
    assert edited != library
    found = problems(checked(make_wheel(edited), clone))
    assert {check.name for check in found} == {"provenance", "provenance: attention_bf16.sm_80"}
    assert all(check.verdict is Verdict.FAIL for check in found)


def test_a_device_binary_that_is_not_embedded(make_wheel: WheelMaker, library: bytes, clone: Path) -> None:
    """The record lists one binary more than the library contains, for a target that it has."""
    right = provenance_of(library, clone)["binaries"]
    check = problems(checked(make_wheel(binaries=[*right, {**right[0], "name": "attention_f32"}]), clone))
    assert ("provenance: attention_f32.sm_80", "not embedded") in {(one.name, one.found) for one in check}


def test_an_edited_host_part(make_wheel: WheelMaker, library: bytes, clone: Path) -> None:
    assert only_failure(checked(make_wheel(library + b"\0"), clone)).why.startswith("The library is not the one")


def test_an_edited_member_whose_record_was_not_edited(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    good = make_wheel()
    bad = tmp_path / good.name
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name) + (b"import os\n" if name == "flashmoe/__init__.py" else b""))
    found = {check.name: check.found for check in problems(checked(bad, clone))}
    size = len(PACKAGE["flashmoe/__init__.py"])
    stated = f"differs: flashmoe/__init__.py, flashmoe/__init__.py ({size} bytes stated, {size + 10} held)"
    assert found == {"wheel record": stated, "files": "differs: flashmoe/__init__.py", "metadata": "RECORD"}


@pytest.mark.parametrize(
    ("member", "content", "word"),
    [
        ("flashmoe/__init__.py", "import os\n", "differs: flashmoe/__init__.py"),
        ("flashmoe/_version.py", VERSION, "differs: flashmoe/_version.py"),
        ("flashmoe/_tables/attention/kernels.toml", "", "differs: flashmoe/_tables/attention/kernels.toml"),
        ("flashmoe_tools/__init__.py", None, "missing: flashmoe_tools/__init__.py"),
        ("flashmoe/hidden.py", "", "not made by a build of the commit: flashmoe/hidden.py"),
        ("flashmoe/attention.cubin", b"", "not made by a build of the commit: flashmoe/attention.cubin"),
        ("evil.pth", "import os", "not made by a build of the commit: evil.pth"),
        ("sitecustomize.py", "", "not made by a build of the commit: sitecustomize.py"),
        ("{info}/licenses/LICENSE", "other", "differs: {info}/licenses/LICENSE"),
        ("{info}/entry_points.txt\n", "", "entry_points.txt\\n"),
    ],
)
def test_files_that_the_commit_does_not_make(
    make_wheel: WheelMaker,
    clone: Path,
    member: str,
    content: str | bytes | None,
    word: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each with a RECORD that lists it with the correct sha256."""
    info = f"flash_moe-{version_here(clone)}.dist-info"
    wheel = make_wheel(files={member.format(info=info): content})
    found = [check for check in problems(checked(wheel, clone)) if check.name == "files"]
    assert word.format(info=info) in found[0].found
    assert main(["verify", str(wheel), "--root", str(clone)]) == ExitCode.FAILED
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("text", ["{}", "not JSON", "[" * 100_000, '{"a": 1, "a": 2}'])
def test_another_bill_of_materials(make_wheel: WheelMaker, clone: Path, text: str) -> None:
    bill = f"flash_moe-{version_here(clone)}.dist-info/sboms/flashmoe.cdx.json"
    assert only_failure(checked(make_wheel(files={bill: text}), clone)).name == "bill of materials"


@pytest.mark.parametrize(
    ("file", "old", "new", "word"),
    [
        ("METADATA", "Requires-Dist: torch", "Requires-Dist: evil\nRequires-Dist: torch", "METADATA Requires-Dist"),
        ("METADATA", "Requires-Dist: torch", "requires-dist: evil\nRequires-Dist: torch", "METADATA Requires-Dist"),
        ("METADATA", "torch>=2.10", "torch>=2.9", "METADATA Requires-Dist"),
        ("METADATA", "Summary: a", "Home-page: http://example.org\nSummary: a", "METADATA Home-Page"),
        ("METADATA", "# A small", "# Another", "METADATA description"),
        ("WHEEL", "false", "true", "WHEEL Root-Is-Purelib"),
        ("WHEEL", "py3-none", "cp311-none", "WHEEL Tag"),
        ("METADATA", "Metadata-Version: 2.5", "Metadata-Version: 1.0", "METADATA Metadata-Version"),
        ("METADATA", "Classifier:", "Classifier: ", "METADATA the bytes"),
        ("WHEEL", "Generator: hatchling 1.33.0", "Generator: hatchling 1.34.0", "WHEEL Generator"),
        ("WHEEL", "Wheel-Version: 1.0", "Wheel-Version: 9.0", "WHEEL Wheel-Version"),
        ("entry_points.txt", "flashmoe.__main__:main", "os:system", "entry_points.txt"),
        ("entry_points.txt", "[console_scripts]", "[console_scripts]\n;evil = os:abort", "entry_points.txt"),
    ],
)
def test_edited_metadata(make_wheel: WheelMaker, clone: Path, file: str, old: str, new: str, word: str) -> None:
    member = f"flash_moe-{version_here(clone)}.dist-info/{file}"
    text = package_of(version_here(clone))[member]
    assert isinstance(text, str)
    assert word in only_failure(checked(make_wheel(files={member: text.replace(old, new)}), clone)).found


def test_a_description_by_another_rule_is_not_proved(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    """The commit's module for the long description differs from the verifier's: neither proved nor refuted, and never PASS."""
    other = tmp_path / "other"
    shutil.copytree(clone, other)
    (other / LINKS).write_text("# another rule\n")
    git(other, "commit", "-qam", "two")
    version = version_here(other)
    text = package_of(version)[f"flash_moe-{version}.dist-info/METADATA"]
    assert isinstance(text, str)
    for description, verdict in ((text, Verdict.PASS), (text.replace("# A small", "# Another"), Verdict.UNPROVED)):
        files = {LINKS: "# another rule\n", f"flash_moe-{version}.dist-info/METADATA": description}
        stated = {
            "commit": git(other, "rev-parse", "HEAD"),
            "source_date_epoch": int(git(other, "log", "-1", "--format=%ct")),
        }
        report = checked(make_wheel(files=files, version=version, **stated), other)
        assert report.verdict is verdict
        assert [check.name for check in problems(report)] == ["metadata"] * (verdict is Verdict.UNPROVED)


def test_another_commit_relabelled(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    """The sources of one commit with the name of another, which is also in the clone."""
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    (root / "flashmoe" / "__init__.py").write_text("repaired = True\n")
    git(root, "commit", "-q", "-a", "-m", "two")
    epoch = int(git(root, "log", "-1", "--format=%ct"))
    wheel = make_wheel(commit=git(root, "rev-parse", "HEAD"), source_date_epoch=epoch, version=version_here(root))
    assert only_failure(checked(wheel, root)).found == "differs: flashmoe/__init__.py"


@pytest.mark.parametrize("stated", ["HEAD", "main", "", "0123abcd", "unknown", "--help", "a" * 41])
def test_only_a_full_hash_names_a_commit(make_wheel: WheelMaker, clone: Path, stated: str) -> None:
    failure = only_failure(checked(make_wheel(commit=stated), clone))
    assert failure.name == "commit"
    assert failure.next_step == ("build from a clone" if stated == "unknown" else "do not install this file")


def test_an_edited_provenance(make_wheel: WheelMaker, clone: Path) -> None:
    assert "is not in this clone" in only_failure(checked(make_wheel(commit="0" * 40), clone)).found
    assert only_failure(checked(make_wheel(source_date_epoch=1), clone)).name == "commit"
    assert only_failure(checked(make_wheel(extension_sha256="0" * 64), clone)).name == "provenance"


def test_each_field_of_the_provenance_is_held_against_the_file_or_the_commit(
    make_wheel: WheelMaker, library: bytes, clone: Path
) -> None:
    """Each leaf of the record is changed, one at a time, and some check fails."""
    right = provenance_of(library, clone)

    def changed(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            yield from ({**value, key: other} for key in value for other in changed(value[key]))
            yield {**value, "further": "x"}
        elif isinstance(value, list):
            yield from ([*value[:n], other, *value[n + 1 :]] for n, one in enumerate(value) for other in changed(one))
            yield value[1:]
            yield [*value, value[-1]]
        else:
            yield {str: f"{value}0", bool: value is False, int: value + 1 if isinstance(value, int) else 0}[type(value)]

    tried = [record for record in changed(right) if record["schema"] == right["schema"]]
    assert len(tried) > 30
    for record in tried:
        report = checked(make_wheel(record=record), clone)
        assert report.verdict not in (Verdict.PASS, Verdict.SKIP), next(k for k in record if record[k] != right.get(k))


def test_a_build_that_says_it_was_dirty_is_not_proved(make_wheel: WheelMaker, clone: Path) -> None:
    report = checked(make_wheel(dirty=True), clone)
    (only,) = problems(report)
    assert (only.name, only.verdict, report.exit_code) == ("commit", Verdict.UNPROVED, ExitCode.NOT_PROVED)
    assert report.to_json()["verdict"] == "NOT PROVED"
    with pytest.raises(VerifyError, match="a wheel of a clean commit"):
        verify(make_wheel(dirty=True), Request(clone_of(clone), again=True))


def test_a_releases_version_needs_its_tag(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    wheel = make_wheel(version="0.1.0")
    found = problems(checked(wheel, clone))
    assert [check.name for check in found] == ["name and version", "files", "metadata"]
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    git(root, "tag", "-a", "v0.1.0", "-m", "release")
    assert problems(checked(wheel, root)) == []
    assert problems(checked(make_wheel(), root)) == []  # built before the tag was set
    assert only_failure(checked(make_wheel(name="flash_moe-9.0-py3-none-manylinux_2_28_x86_64.whl"), root)).name == (
        "name and version"
    )


def test_a_wheel_for_the_cpu_only(workshop: Workshop, make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    none: tuple[Row, ...] = ()
    library = workshop.library(none, torch=False, host=CPU_ONLY).read_bytes()
    record = {**provenance_of(library, clone), "targets": [], "binaries": []}
    wheel = make_wheel(library, record)
    assert problems(checked(wheel, clone)) == []
    content = read_wheel(wheel, tmp_path / "again")
    assert build_environment(content, os.environ)["FLASHMOE_ARCHS"] == "none"
    assert all(check.verdict is Verdict.PASS for check in compare(content, content))


WRONG: dict[str, Any] = {
    "no object": [],
    "a key twice": '{"schema": "flashmoe.provenance/1", "commit": "a", "commit": "b"}',
    "deep": "[" * 100_000,
    "not JSON": "{",
    "another schema": {"schema": "other"},
    "commit": {"commit": 7},
    "dirty": {"dirty": "no"},
    "time": {"source_date_epoch": None},
    "locks": {"locks": []},
    "compilers": {"compilers": "g++"},
    "compiler": {"compilers": {"cxx": ["g++"]}},
    "targets": {"targets": [{}]},
    "binaries": {"binaries": [7]},
    "binary": {"binaries": [{"name": "a", "target": [], "sha256": ""}]},
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_provenance_of_wrong_types_is_refused_in_words(
    make_wheel: WheelMaker, library: bytes, clone: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = WRONG[kind]
    if isinstance(wrong, dict) and "schema" not in wrong:
        wrong = {**provenance_of(library, clone), **wrong}
    wheel = make_wheel(record=wrong if isinstance(wrong, str) else json.dumps(wrong))
    assert main(["verify", str(wheel), "--root", str(clone)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("VerifyError: ")
    assert "flashmoe/provenance.json" in message


@pytest.mark.parametrize("record", ["a,\0,b\n", "flashmoe/__init__.py," + "x" * 200_000 + ",\n", '"\n'])
def test_a_record_that_cannot_be_read_is_a_finding(
    make_wheel: WheelMaker, clone: Path, tmp_path: Path, record: str
) -> None:
    good = make_wheel()
    bad = tmp_path / good.name
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for name in source.namelist():
            target.writestr(name, record if name.endswith("/RECORD") else source.read(name))
    assert [check.name for check in problems(checked(bad, clone))] == ["wheel record", "metadata"]


@pytest.mark.parametrize("edit", ["size", "order"])
def test_record_is_the_one_that_a_build_writes(make_wheel: WheelMaker, clone: Path, tmp_path: Path, edit: str) -> None:
    """A wrong size, which installers ignore, and correct lines in another order."""
    good = make_wheel()
    bad = tmp_path / good.name
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for name in source.namelist():
            text = source.read(name)
            if name.endswith("/RECORD"):
                lines = text.decode().splitlines(keepends=True)
                text = "".join(
                    [*lines[1:], lines[0]] if edit == "order" else [f"{lines[0][:-1]}0\n", *lines[1:]]
                ).encode()
            target.writestr(name, text)
    assert [check.name for check in problems(checked(bad, clone))] == ["wheel record"] * (edit == "size") + ["metadata"]


def test_no_provenance(make_wheel: WheelMaker, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(make_wheel(record=None)), "--root", str(clone)]) == 1
    assert "has no readable flashmoe/provenance.json" in capsys.readouterr().err


def test_another_projects_wheel(workshop: Workshop, library: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str, bytes | str] = {"other/__init__.py": "", "other/_C.so": library}
    wheel = workshop.wheel(files, name="other-1.0-py3-none-manylinux_2_28_x86_64.whl")
    assert main(["verify", str(wheel)]) == 1
    assert "it is not a wheel of flashmoe" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"no zip at all"])
def test_no_wheel_at_all(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flashmoe_kernels-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    path.write_bytes(content)
    assert main(["verify", str(path)]) == 1
    assert "is not a valid wheel" in capsys.readouterr().err


def test_outside_a_clone_the_commit_is_not_checked(make_wheel: WheelMaker, tmp_path: Path) -> None:
    assert find_clone(tmp_path) is None
    skipped = {c.name for c in verify(make_wheel(), Request()).checks if c.verdict is Verdict.SKIP}
    assert skipped == {"commit", "rebuilt wheel", "signature"}


def test_the_report_is_written(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    path = tmp_path / "verify.json"
    assert main(["verify", str(make_wheel()), "--root", str(clone), "--json", str(path)]) == 0
    assert json.loads(path.read_text())["verdict"] == "PASS"


def test_a_file_in_a_folder_of_lockfiles_is_no_lock(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    (root / "lockfiles" / "old").mkdir()
    (root / "lockfiles" / "old" / "build.txt").write_text("torch==1.0\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "two")
    epoch = int(git(root, "log", "-1", "--format=%ct"))
    wheel = make_wheel(commit=git(root, "rev-parse", "HEAD"), source_date_epoch=epoch, version=version_here(root))
    assert "lock files" not in {check.name for check in problems(checked(wheel, root))}


def test_a_folder_that_the_wheel_leaves_out_is_no_file_of_its_name() -> None:
    pyproject = b'[tool.hatch.build.targets.wheel]\npackages = ["pkg"]\nexclude = ["pkg/*/planted/"]\n'
    packed = ["pkg/planted.py", "pkg/one", "pkg/one/planted", "pkg/planted/one/two.py"]
    assert wheel_sources(pyproject, [*packed, "pkg/one/planted/two.py", "pkg/two/planted/a/b.py", "other.py"]) == packed


def test_names_are_shown_as_they_are_unless_they_would_not_be_a_line() -> None:
    assert printable("größe\\.py") == "größe\\.py"
    assert printable("a\nb\x1b[0m") == r"a\nb\x1b[0m"


def test_a_long_list_of_files_says_how_many_more(make_wheel: WheelMaker, clone: Path) -> None:
    more = {f"flashmoe/extra{number}.py": "" for number in range(10)}
    message = {check.name: check.found for check in problems(checked(make_wheel(files=more), clone))}["files"]
    assert message.endswith("flashmoe/extra7.py and 2 more")
    message = {
        check.name: check.found for check in problems(checked(make_wheel(files=dict(list(more.items())[:8])), clone))
    }["files"]
    assert message.endswith("flashmoe/extra7.py")
