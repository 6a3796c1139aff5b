"""`python -m flashmoe verify`: each kind of tampering is found, and nothing that the wheel says of itself excuses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from release_builders import (
    PACKAGE,
    README,
    VERSION,
    Row,
    Workshop,
    git,
    package_of,
    provenance_of,
    version_here,
    write_sources,
)

from flashmoe.__main__ import main
from flashmoe.errors import ExitCode
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.verify import repository
from flashmoe_tools.verify.cli import Request, verify
from flashmoe_tools.verify.content import read_wheel
from flashmoe_tools.verify.errors import VerifyError
from flashmoe_tools.verify.files import LINKS, expected_content
from flashmoe_tools.verify.rebuild import build_environment, compare, find_compiler, rebuild
from flashmoe_tools.verify.repository import Clone, Objects, find_clone
from flashmoe_tools.verify.signature import judge_statement

WheelMaker = Callable[..., Path]
# The build of no target leaves one byte where the binaries would be.
CPU_ONLY = """
__asm__(".section .flashmoe.cubins,\\"a\\",@progbits\\n.byte 0\\n.previous");
extern "C" int flashmoe_cpu_isa() { return 0; }
"""
KERNEL = b"\x7fELF bf16 "
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


def clone_of(root: Path) -> Clone:
    found = find_clone(root)
    assert found is not None
    return found


def checked(wheel: Path, root: Path) -> Report:
    return verify(wheel, Request(clone_of(root)))


def problems(report: Report) -> list[Check]:
    return [check for check in report.checks if check.verdict not in (Verdict.PASS, Verdict.SKIP)]


def only_failure(report: Report) -> Check:
    (only,) = problems(report)
    assert only.verdict is Verdict.FAIL
    assert report.exit_code == ExitCode.FAILED
    return only


def test_a_sound_wheel_passes_and_says_what_was_not_checked(
    make_wheel: WheelMaker, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = make_wheel()
    report = checked(wheel, clone)
    assert problems(report) == []
    assert {check.name for check in report.checks if check.verdict is Verdict.PASS} == COMPARED
    assert set(report.data["binaries"]) == {"attention_f16.sm_80", "attention_bf16.sm_80"}
    assert main(["verify", str(wheel), "--root", str(clone)]) == 0
    told = capsys.readouterr().out
    assert "not checked  rebuilt wheel: not asked for: the compiled library" in told
    assert told.rstrip().endswith("not checked: rebuilt wheel, signature")


def test_an_edited_device_binary(make_wheel: WheelMaker, library: bytes, clone: Path) -> None:
    edited = library.replace(KERNEL, b"\x7fELF bf17 ", 1)
    assert edited != library
    found = problems(checked(make_wheel(edited), clone))
    assert {check.name for check in found} == {"provenance", "provenance: attention_bf16.sm_80"}
    assert all(check.verdict is Verdict.FAIL for check in found)


def test_a_device_binary_that_is_not_embedded(make_wheel: WheelMaker, library: bytes, clone: Path) -> None:
    """The record lists one more than the library holds, of a target that it has."""
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
    """Each with a RECORD that lists it with its right sha256."""
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
    """The commit makes the long description by a module that is not the verifier's: neither proved nor refuted, and never PASS."""
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
    """The sources of one commit under the name of another, which the clone has, too."""
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    (root / "flashmoe" / "__init__.py").write_text("repaired = True\n")
    git(root, "commit", "-q", "-a", "-m", "two")
    epoch = int(git(root, "log", "-1", "--format=%ct"))
    wheel = make_wheel(commit=git(root, "rev-parse", "HEAD"), source_date_epoch=epoch, version=version_here(root))
    assert only_failure(checked(wheel, root)).found == "differs: flashmoe/__init__.py"


@pytest.mark.parametrize("stated", ["HEAD", "main", "", "0123abcd", "unknown", "--help", "a" * 41])
def test_only_a_full_hash_names_a_commit(make_wheel: WheelMaker, clone: Path, stated: str) -> None:
    report = checked(make_wheel(commit=stated), clone)
    assert only_failure(report).name == "commit"


def test_an_edited_provenance(make_wheel: WheelMaker, clone: Path) -> None:
    assert "is not in this clone" in only_failure(checked(make_wheel(commit="0" * 40), clone)).found
    assert only_failure(checked(make_wheel(source_date_epoch=1), clone)).name == "commit"
    assert only_failure(checked(make_wheel(extension_sha256="0" * 64), clone)).name == "provenance"


def test_each_field_of_the_provenance_is_held_against_the_file_or_the_commit(
    make_wheel: WheelMaker, library: bytes, clone: Path
) -> None:
    """Each leaf of the record is changed, one at a time, and something says so."""
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
    told = capsys.readouterr().err
    assert told.startswith("VerifyError: ")
    assert "flashmoe/provenance.json" in told


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
    """A wrong size that installers ignore, and right lines in another order."""
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


# ---- the clone's configuration


def test_no_program_of_the_clones_configuration_runs(
    make_wheel: WheelMaker, clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clone whose configuration names programs for everything that git would run; a real git runs the signature program."""
    root, traces = Path(shutil.copytree(clone, tmp_path / "clone")), tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho \"$0 $*\" >>'{traces}'\n")
    program.chmod(0o755)
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        (root / ".git" / "hooks").mkdir(exist_ok=True)
        shutil.copy(program, root / ".git" / "hooks" / hook)
    for name in (
        "core.fsmonitor",
        "core.pager",
        "core.sshCommand",
        "gpg.program",
        "core.editor",
        "filter.x.smudge",
        "filter.x.process",
    ):
        git(root, "config", name, str(program))
    git(root, "config", "log.showSignature", "true")
    git(root, "config", "alias.cat-file", f"!{program}")
    (root / ".git" / "info").mkdir(exist_ok=True)
    (root / ".git" / "info" / "attributes").write_text("* filter=x\n")
    wheel = make_wheel()
    assert problems(checked(wheel, root)) == []
    with pytest.raises(VerifyError, match=r"no \./nox"):
        rebuild(read_wheel(wheel, tmp_path / "given"), clone_of(root), (), tmp_path)
    assert (tmp_path / "tree" / "README.md").read_text() == README
    assert not traces.exists(), traces.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: a folder cannot be given to another user")
def test_a_repository_of_another_user_is_refused(
    make_wheel: WheelMaker,
    clone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    for path in (root, root / ".git"):
        os.chown(path, 65534, 65534)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    assert main(["verify", str(make_wheel()), "--root", str(root)]) == 1
    assert "it belongs to another user" in capsys.readouterr().err
    trusted = tmp_path / "gitconfig"
    trusted.write_text(f"[safe]\n\tdirectory = {root}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(trusted))
    assert main(["verify", str(make_wheel()), "--root", str(root)]) == 0


def test_a_replaced_object_is_not_taken_for_the_commit(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    first = git(root, "rev-parse", "HEAD")
    (root / "flashmoe" / "__init__.py").write_text("evil = True\n")
    git(root, "commit", "-q", "-a", "-m", "evil")
    git(root, "replace", first, git(root, "rev-parse", "HEAD"))
    objects = Objects(clone_of(root), tmp_path / "objects.git")
    commit = objects.commit(first)
    assert commit is not None
    digest = commit.tree["flashmoe/__init__.py"]
    assert b"evil" not in objects.read([digest])[digest]


@pytest.mark.parametrize("name", ["HEAD", "v0.1.0", "0" * 39, "0" * 39 + "g"])
def test_the_reader_of_objects_takes_a_full_hash(clone: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(VerifyError, match="is not the full hash of a commit"):
        Objects(clone_of(clone), tmp_path / "objects.git").commit(name)


@pytest.mark.parametrize(
    "gone", ["pyproject.toml", "flashmoe/_version.py", "lockfiles/build.txt", "LICENSE", "README.md"]
)
def test_a_commit_without_what_a_build_needs_is_none_of_ours(
    make_wheel: WheelMaker, clone: Path, tmp_path: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A licence that a pattern does not find is none; the wheel holds one file more then."""
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    git(root, "rm", "-q", gone)
    git(root, "commit", "-q", "-m", "less")
    stamp = int(git(root, "log", "-1", "--format=%ct"))
    wheel = make_wheel(commit=git(root, "rev-parse", "HEAD"), source_date_epoch=stamp)
    assert main(["verify", str(wheel), "--root", str(root)]) == 1
    told = capsys.readouterr()
    assert gone in told.out + told.err


def test_a_clone_without_the_commits_tree_is_told(clone: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    head, tree = git(root, "rev-parse", "HEAD"), git(root, "rev-parse", "HEAD^{tree}")
    (root / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    with pytest.raises(VerifyError, match=f"only a part of commit {head[:12]}"):
        Objects(clone_of(root), tmp_path / "objects.git").commit(head)


@pytest.mark.parametrize("gone", ["pyproject.toml", "flashmoe/_version.py"])
def test_a_commit_without_a_version_is_named_as_none_of_ours(clone: Path, tmp_path: Path, gone: str) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    git(root, "rm", "-q", gone)
    git(root, "commit", "-q", "-m", "less")
    objects = Objects(clone_of(root), tmp_path / "objects.git")
    commit = objects.commit(git(root, "rev-parse", "HEAD"))
    assert commit is not None
    with pytest.raises(VerifyError, match=f"has no {gone}, so it is no commit of flashmoe"):
        expected_content(objects, commit, frozenset())


def test_a_root_that_is_no_clone_is_told(
    make_wheel: WheelMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(make_wheel()), "--root", str(tmp_path)]) == 1
    assert "is not in a clone that git can read" in capsys.readouterr().err


# ---- a rebuilt wheel


def compared(first: Path, second: Path, folder: Path) -> list[Check]:
    return compare(read_wheel(first, folder / "one"), read_wheel(second, folder / "two"))


def test_a_rebuilt_wheel_of_the_same_bytes(make_wheel: WheelMaker, tmp_path: Path) -> None:
    wheel = make_wheel()
    shutil.copy(wheel, tmp_path / wheel.name)
    checks = compared(wheel, tmp_path / wheel.name, tmp_path)
    assert [check.verdict for check in checks] == [Verdict.PASS, Verdict.PASS]


def test_what_the_wheel_says_of_its_compiler_excuses_nothing(
    make_wheel: WheelMaker, library: bytes, tmp_path: Path
) -> None:
    """An edited library under the name of another compiler: not a pass in any form, in words or by exit code."""
    compilers = {"cxx": "g++ 14.1.0"}
    edited = make_wheel(library + b"\0", compilers=compilers)
    binaries, wheel = compared(edited, make_wheel(), tmp_path)
    assert binaries.verdict is Verdict.PASS
    assert wheel.verdict is Verdict.UNPROVED
    assert "says that its host part was compiled by g++ 14.1.0; here it was g++ 12.2.0" in wheel.why
    assert Report("verify", (binaries, wheel)).exit_code == ExitCode.NOT_PROVED != 0


def test_another_compiler_explains_no_other_file(make_wheel: WheelMaker, library: bytes, tmp_path: Path) -> None:
    edited = make_wheel(library + b"\0", compilers={"cxx": "g++ 14.1.0"}, files={"flashmoe/__init__.py": "edited"})
    assert compared(edited, make_wheel(), tmp_path)[1].verdict is Verdict.FAIL


def test_the_same_host_compiler_must_give_the_same_bytes(
    make_wheel: WheelMaker, library: bytes, tmp_path: Path
) -> None:
    _, wheel = compared(make_wheel(), make_wheel(library + b"\0"), tmp_path)
    assert wheel.verdict is Verdict.FAIL
    assert "flashmoe/libflashmoe.so" in wheel.found


def test_a_device_binary_must_match_whatever_the_host_compiler(
    make_wheel: WheelMaker, library: bytes, tmp_path: Path
) -> None:
    edited = library.replace(KERNEL, b"\x7fELF bf17 ", 1)
    first, *_ = compared(make_wheel(), make_wheel(edited, compilers={"cxx": "g++ 14.1.0"}), tmp_path)
    assert (first.name, first.verdict) == ("rebuilt device binary attention_bf16.sm_80", Verdict.FAIL)


def test_the_compiler_that_the_wheel_names_is_taken_where_it_is(tmp_path: Path) -> None:
    for name, version in (("g++", "12.2.0"), ("g++-14", "14.1.0"), ("g++-13", "13.1.0")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    assert find_compiler("g++ 14.1.0", environ) == str(tmp_path / "g++-14")
    assert find_compiler("g++ 12.2.0", environ) == str(tmp_path / "g++")
    assert find_compiler("g++ 13.3.0", environ) == ""
    assert find_compiler("g++ 14.1.0; rm -rf .", environ) == ""


def test_rebuild_takes_the_wheels_commit_and_leaves_the_clone_as_it_was(
    make_wheel: WheelMaker, clone: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    write_sources(root)
    (root / "nox").write_text(
        '#!/bin/sh\nfound="$(git status --porcelain; git tag)"; mkdir dist && echo "$found" >dist/a.whl\n'
    )
    (root / "nox").chmod(0o755)
    git(root, "add", "nox")
    git(root, "commit", "-q", "-m", "nox")
    head, refs = git(root, "rev-parse", "HEAD"), git(root, "show-ref")
    wheel = make_wheel(commit=head, source_date_epoch=int(git(root, "log", "-1", "--format=%ct")))
    built = rebuild(read_wheel(wheel, tmp_path / "given"), clone_of(root), ["v0.1.0"], tmp_path)
    assert built.read_text() == "v0.1.0\n"  # a clean tree, with the tag
    assert (git(root, "show-ref"), git(root, "worktree", "list").count("\n")) == (refs, 0)


def test_a_build_that_fails_is_told_with_its_last_lines(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    (root / "nox").write_text("#!/bin/sh\nmkdir dist && touch dist/a.whl && echo nvrtc is missing && exit 7\n")
    (root / "nox").chmod(0o755)
    git(root, "add", "nox")
    git(root, "commit", "-q", "-m", "nox")
    stamp = int(git(root, "log", "-1", "--format=%ct"))
    given = read_wheel(make_wheel(commit=git(root, "rev-parse", "HEAD"), source_date_epoch=stamp), tmp_path / "given")
    with pytest.raises(VerifyError, match=r"exit status 7:\nnvrtc is missing"):
        rebuild(given, clone_of(root), (), tmp_path)


@pytest.mark.parametrize(("machine", "here", "platform"), [("x86_64", "x86_64", None), ("x86_64", "aarch64", "x86_64")])
def test_a_rebuild_for_another_machine_names_it(
    make_wheel: WheelMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    here: str,
    platform: str | None,
) -> None:
    """The library's machine, by its header, against the one that rebuilds; with the compiler of that name."""
    content = read_wheel(make_wheel(), tmp_path / "given")
    assert content.machine == machine
    monkeypatch.setattr("platform.machine", lambda: here)
    version = content.stated.cxx.removeprefix("g++ ")
    for name in ("g++", f"{machine}-linux-gnu-g++"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    built = build_environment(content, {"PATH": str(tmp_path), "FLASHMOE_PLATFORM": "other"})
    assert built.get("FLASHMOE_PLATFORM") == platform
    assert built["CXX"] == str(tmp_path / (f"{machine}-linux-gnu-g++" if platform else "g++"))


def test_a_long_list_of_files_says_how_many_more(make_wheel: WheelMaker, clone: Path) -> None:
    more = {f"flashmoe/extra{number}.py": "" for number in range(10)}
    told = {check.name: check.found for check in problems(checked(make_wheel(files=more), clone))}["files"]
    assert told.endswith("flashmoe/extra7.py and 2 more")
    told = {
        check.name: check.found for check in problems(checked(make_wheel(files=dict(list(more.items())[:8])), clone))
    }["files"]
    assert told.endswith("flashmoe/extra7.py")


def test_a_repository_without_objects_is_no_clone(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git takes its objects from where GIT_OBJECT_DIRECTORY says, but that is another repository's."""
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    answer = types.SimpleNamespace(returncode=0, stdout=f"{root}\n{tmp_path / 'gone'}\n".encode(), stderr=b"")
    monkeypatch.setattr("flashmoe_tools.verify.repository._run", lambda *_: answer)
    assert find_clone(root) is None


# ---- a signature


@dataclass
class FakeSigstore:
    """A fake of the library: what it was asked, and what it answers."""

    statement: bytes = b""
    error: str = ""
    asked: tuple[Any, ...] = ()


@pytest.fixture
def sigstore(monkeypatch: pytest.MonkeyPatch) -> FakeSigstore:
    fake = FakeSigstore()

    class VerificationError(Exception):
        pass

    class Verifier:
        @staticmethod
        def production(*, offline: bool) -> Verifier:
            return Verifier()

        def verify_dsse(self, bundle: Any, policy: Any) -> tuple[str, bytes]:
            fake.asked = (bundle, policy)
            if fake.error:
                raise VerificationError(fake.error)
            return "application/vnd.in-toto+json", fake.statement

        def verify_artifact(self, content: bytes, bundle: Any, policy: Any) -> None:
            fake.asked = (content, bundle, policy)

    def module(name: str, **names: Any) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, made)

    module("sigstore")
    module("sigstore.errors", VerificationError=VerificationError)
    module("sigstore.models", Bundle=types.SimpleNamespace(from_json=json.loads))
    module("sigstore.verify", Verifier=Verifier)
    module("sigstore.verify.policy", Identity=lambda **words: words)
    return fake


def signed(wheel: Path, bundle: Path, clone: Path) -> int:
    words = ["--bundle", str(bundle), "--identity", "us", "--issuer", "them"]
    return main(["verify", str(wheel), "--root", str(clone), *words])


def test_a_bundle_is_held_against_the_identity_and_this_file(
    make_wheel: WheelMaker, clone: Path, tmp_path: Path, sigstore: FakeSigstore, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel, bundle = make_wheel(), tmp_path / "bundle.json"
    bundle.write_text('{"dsseEnvelope": {}}')
    digest = verify(wheel, Request(clone_of(clone))).data["sha256"]
    sigstore.statement = json.dumps({"subject": [{"digest": {"sha256": digest}}], "predicateType": "p"}).encode()
    assert signed(wheel, bundle, clone) == 0
    assert sigstore.asked[1] == {"identity": "us", "issuer": "them"}
    sigstore.statement = json.dumps({"subject": [{"digest": {"sha256": "0" * 64}}]}).encode()
    assert signed(wheel, bundle, clone) == ExitCode.FAILED
    sigstore.statement, sigstore.error = b"", "no such identity"
    assert signed(wheel, bundle, clone) == ExitCode.FAILED
    assert "no such identity" in capsys.readouterr().out
    bundle.write_text('{"messageSignature": {}}')
    assert signed(wheel, bundle, clone) == 0
    assert sigstore.asked[0] == wheel.read_bytes()


def test_a_bundle_without_an_identity_is_an_error(
    make_wheel: WheelMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(make_wheel()), "--bundle", str(tmp_path)]) == ExitCode.USAGE
    assert "--identity" in capsys.readouterr().err


def test_without_the_library_the_extra_is_named(
    make_wheel: WheelMaker,
    clone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "sigstore", None)
    monkeypatch.setitem(sys.modules, "sigstore.errors", None)
    assert signed(make_wheel(), tmp_path, clone) == 1
    assert "[sign]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "payload", [b"", b"[" * 100_000, b"{}", b'{"subject": 7}', b'{"subject": [{"digest": []}]}', b"\xff"]
)
def test_a_statement_about_nothing(payload: bytes) -> None:
    assert judge_statement("0" * 64, "application/vnd.in-toto+json", payload, "us").verdict is Verdict.FAIL


@pytest.mark.parametrize(("status", "lines"), [(1, 2), (0, 1), (0, 3)])
def test_an_answer_of_git_that_is_no_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, lines: int
) -> None:
    """Two lines and no error: the folders of the files and of the objects."""
    (tmp_path / "objects").mkdir()

    def answer(status: int, lines: int, error: bytes = b"") -> None:
        done = subprocess.CompletedProcess([], status, f"{tmp_path}\n".encode() * lines, error)
        monkeypatch.setattr(repository, "_run", lambda *_: done)

    answer(0, 2)
    assert find_clone(tmp_path) == Clone(tmp_path, tmp_path / "objects")
    answer(status, lines)
    assert find_clone(tmp_path) is None
    for words in (b"fatal: detected dubious ownership", b"git config --add safe.directory"):
        answer(128, 0, words)
        with pytest.raises(VerifyError, match="belongs to another user"):
            find_clone(tmp_path)


def test_tags_of_a_commit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"a" * 40 + b" refs/tags/v1^{}\n" + b"b" * 40 + b" refs/tags/v2\n"
    monkeypatch.setattr(repository, "_run", lambda *_: subprocess.CompletedProcess([], 0, text, b""))
    assert Clone(tmp_path, tmp_path).tags_at("a" * 40) == {"v1"}
