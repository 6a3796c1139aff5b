"""What `verify` says, whole, for each thing that can be so or otherwise: one change at a time to what is right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe.errors import ArgumentError
from flashmoe_tools import sbom
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.verify import cli, content, files, metadata, rebuild, repository, signature
from flashmoe_tools.verify.errors import VerifyError

COMMIT, OTHER = "c" * 40, "d" * 40
FOUND = SimpleNamespace(digest=COMMIT, epoch=7, tree={})


def told(check: Check) -> tuple[str, ...]:
    return (check.verdict.name, check.found, check.expected, check.why, check.next_step)


def of(**stated: Any) -> Any:
    """Content that states this."""
    return SimpleNamespace(stated=SimpleNamespace(**{"commit": COMMIT, "dirty": False, "epoch": 7, **stated}))


SHOWN = COMMIT[:12]
ANYWHERE = "A name or a part of a hash can be made to lead anywhere."
SHALLOW = "Either the clone is shallow or old, or the wheel came from elsewhere."


@pytest.mark.parametrize(
    ("stated", "known", "words", "is_given"),
    [
        ({"commit": "main"}, FOUND, ("FAIL", "main", "the full hash of a commit", ANYWHERE, "do not install this file"), False),
        ({"commit": "unknown"}, FOUND, ("FAIL", "unknown", "the full hash of a commit", ANYWHERE, "build from a clone"), False),
        ({"dirty": True}, FOUND, ("UNPROVED", f"{SHOWN}, with uncommitted changes", "a clean commit",
         "No commit holds these sources, so nothing in the wheel can be compared.", "build from a clean clone"), False),
        ({}, "no clone", ("SKIP", f"{SHOWN}: not compared", "", "", cli.NEEDS_CLONE), False),
        ({}, None, ("FAIL", f"{SHOWN} is not in this clone", "a commit of the project", SHALLOW, "git fetch --unshallow --all, then again"), False),
        ({"epoch": 8}, FOUND, ("FAIL", "time 8", f"time 7 of {SHOWN}", "", "the record was edited"), True),
        ({}, FOUND, ("PASS", f"{SHOWN}, clean, in this clone", "", "", ""), True),
    ],
)  # fmt: skip
def test_a_commit(stated: dict[str, Any], known: Any, words: tuple[str, ...], is_given: bool) -> None:
    objects: Any = None if known == "no clone" else SimpleNamespace(commit=lambda _: known)
    check, commit = cli.check_commit(of(**stated), objects)
    assert told(check) == words
    assert (commit is not None) is is_given


LOCK = b"torch==2.10.0\nnvidia-cuda-nvrtc-cu12==12.8.93\nnvidia-cuda-nvcc-cu12==12.8.93\nnvidia-cuda-runtime-cu12==12.8.90\n"
LOCKS = {"build.txt": hashlib.sha256(LOCK).hexdigest(), "test.txt": hashlib.sha256(b"t").hexdigest()}
COMPILERS = {
    "nvrtc": "12.8.93",
    "ptxas": "12.8.93",
    "cuda_headers": "12.8.90",
    "torch_headers": "2.10.0",
    "cxx": "g++ 1",
}


@pytest.mark.parametrize(
    ("locks", "compilers", "found", "wanted"),
    [
        ({}, {}, "", ""),
        ({}, {"cxx": "g++ 2", "other": "3"}, "", ""),  # of which a lock says nothing
        ({}, {"nvrtc": "12.9.0"}, "nvrtc 12.9.0", "nvrtc 12.8.93"),
        ({"test.txt": "0" * 64}, {}, f"lockfiles/test.txt {'0' * 16}", f"lockfiles/test.txt {LOCKS['test.txt'][:16]}"),
        ({"more.txt": "1" * 64}, {}, f"lockfiles/more.txt {'1' * 16}", "lockfiles/more.txt None"),
        ({"a\n": "x"}, dict.fromkeys(COMPILERS, "1"), "cuda_headers 1, lockfiles/a\\n x, nvrtc 1, ptxas 1",
         "cuda_headers 12.8.90, lockfiles/a\\n None, nvrtc 12.8.93, ptxas 12.8.93"),
    ],
)  # fmt: skip
def test_locks(locks: dict[str, str], compilers: dict[str, str], found: str, wanted: str) -> None:
    tree = {"lockfiles/build.txt": "b", "lockfiles/test.txt": "t", "lockfiles/in/x.txt": "x", "lockfiles/a.md": "m"}
    commit: Any = SimpleNamespace(digest=COMMIT, tree=tree)
    objects: Any = SimpleNamespace(read=lambda asked: {one: {"b": LOCK, "t": b"t"}[one] for one in asked})
    check = cli.check_locks(of(locks={**LOCKS, **locks}, compilers={**COMPILERS, **compilers}), objects, commit)
    if not found:
        assert told(check) == ("PASS", "2 are the commit's, compilers and headers as pinned there", "", "", "")
        commit.tree = {"lockfiles/test.txt": "t"}
        with pytest.raises(
            VerifyError, match=r"commit c{12} has no lockfiles/build\.txt, so it is no commit of flashmoe"
        ):
            cli.check_locks(of(locks={}, compilers={}), objects, commit)
    else:
        why = "The compilers came from another lock than the commit's."
        assert told(check) == ("FAIL", found, wanted, why, "do not install this file")


@pytest.mark.parametrize(
    ("version", "partial", "tags"), [("1.0", "", {"v1.0"}), ("1.0+sm80", "sm80", {"v1.0"}), ("2.0", "", set())]
)
def test_the_tag_that_counts(version: str, partial: str, tags: set[str]) -> None:
    clone: Any = SimpleNamespace(
        tags_at=lambda commit: frozenset({"v1.0", "v3.0", "other"} if commit == COMMIT else ())
    )
    assert cli.relevant_tags(of(version=version, partial=partial), clone) == tags
    assert not cli.relevant_tags(of(version=version, partial=partial, commit=OTHER), clone)


def test_what_was_not_asked_for() -> None:
    (rebuilt,) = cli.check_rebuild(of(), None, cli.Request(), Path())
    signed = cli.check_bundle(of(), cli.Request())
    found = "not asked for: the compiled library was compared with the wheel's own record only"
    assert told(rebuilt) == ("SKIP", found, "", "", "--rebuild, in a clone")
    step = "--bundle FILE --identity WHO --issuer WHERE"
    assert told(signed) == ("SKIP", "no bundle given: who built it is unknown", "", "", step)
    clone: Any = SimpleNamespace()
    for asked, commit in ((cli.Request(again=True), FOUND), (cli.Request(clone, again=True), None)):
        with pytest.raises(VerifyError, match="--rebuild needs a clone"):
            cli.check_rebuild(of(), commit, asked, Path())
    for given in (("b", "who", ""), ("b", "", "where"), ("b", "", "")):
        with pytest.raises(ArgumentError, match="--bundle needs --identity and --issuer"):
            signature.check_options(SimpleNamespace(bundle=given[0], identity=given[1], issuer=given[2]))
    for given in (("b", "who", "where"), (None, "", "")):
        signature.check_options(SimpleNamespace(bundle=given[0], identity=given[1], issuer=given[2]))


@pytest.mark.parametrize("verdict", list(Verdict))
@pytest.mark.parametrize("words", [("", "", ""), ("e", "w", "n"), ("", "w", "")])
def test_lines_of_a_check(verdict: Verdict, words: tuple[str, str, str]) -> None:
    data = {"wheel": "a\n.whl", "commit": COMMIT}
    lines = cli.render(Report("verify", (Check("a\nname", verdict, "f\x1b", *words),), data))
    word = "not checked" if verdict is Verdict.SKIP else str(verdict)
    more = [f"      {name}: {text}" for name, text in zip(("expected", "why", "next"), words, strict=True) if text]
    assert lines[:-1] == [f"{word}  a\\nname: f\\x1b", *(more if verdict is not Verdict.PASS else [])]
    left = "; not checked: a\nname" if verdict is Verdict.SKIP else ""
    assert lines[-1].endswith(f": a\\n.whl of commit {SHOWN}{left}")


@pytest.mark.parametrize(
    ("notes", "changes", "words"),
    [
        (b"GCC: (Debian) 12.2.0\0\0", {}, ("PASS", "x86_64, g++ 12.2.0, as in the library", "")),
        (b"GCC: 12.2.0\0GCC: 13.1.0\0", {"platform": "aarch64"},
         ("FAIL", "aarch64, g++ 12.2.0", "x86_64, g++ 12.2.0 or g++ 13.1.0, as in the library")),
        (b"GCC: 12.2.0", {"cxx": "g++ 13"}, ("FAIL", "x86_64, g++ 13", "x86_64, g++ 12.2.0, as in the library")),
        (None, {}, ("FAIL", "x86_64, g++ 12.2.0", "x86_64, a compiler, as in the library")),
        (b"GCC: 12.2.0", {"record": {"schema": 1, "zeal": 2}, "compilers": {"cxx": "", "nvrtc": "", "rustc": ""}},
         ("UNPROVED", "flashmoe/provenance.json has ['rustc', 'zeal'], too", "known fields")),
    ],
)  # fmt: skip
def test_the_host(
    monkeypatch: pytest.MonkeyPatch, notes: bytes | None, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(content, "open_elf", lambda *_: None)
    monkeypatch.setattr(content, "section_data", lambda *_: notes)
    stated = {"platform": "x86_64", "cxx": "g++ 12.2.0", "record": {"schema": 1}, "compilers": {"cxx": ""}, **changes}
    given: Any = SimpleNamespace(stated=SimpleNamespace(**stated), machine="x86_64", read=lambda _: b"")
    assert told(content.check_host(given))[:3] == words


PROJECT: Mapping[str, Any] = {
    "name": "Flash.Moe",
    "description": "small",
    "license": "MIT",
    "authors": [{"name": "A"}, {"name": "B", "email": "b@x"}, {"name": "C"}, {"name": "D", "email": "d@x"}],
    "keywords": ["z", "a"],
    "classifiers": ["Y", "X"],
    "requires-python": ">=3",
    "urls": {"Source": "s", "Docs": "d"},
    "dependencies": ["Torch_X>=2", "a ; python_version < '3.11'"],
    "optional-dependencies": {"t": ["b; os_name == 'nt'", "c"], "s": ["d"]},
    "scripts": {"z": "m:f", "a": "m:g"},
    "gui-scripts": {"g": "m:h"},
    "entry-points": {"y": {"k": "m:i"}, "empty": {}, "x": {"l": "m:j"}},
    "license-files": ["LICENSE*", "in/*.txt"],
}
HEADERS = """\
Metadata-Version: 2.5
Name: Flash.Moe
Version: 1.0
Summary: small
Project-URL: Source, s
Project-URL: Docs, d
Author: A, C
Author-email: B <b@x>, D <d@x>
License-Expression: MIT
License-File: LICENSE
Keywords: a,z
Classifier: X
Classifier: Y
Requires-Python: >=3
Requires-Dist: a; python_version < '3.11'
Requires-Dist: torch-x>=2
Provides-Extra: s
Requires-Dist: d; extra == 's'
Provides-Extra: t
Requires-Dist: b; (os_name == 'nt') and extra == 't'
Requires-Dist: c; extra == 't'
Description-Content-Type: text/markdown
"""
COMMANDS = "[console_scripts]\na = m:g\nz = m:f\n\n[gui_scripts]\ng = m:h\n\n[x]\nl = m:j\n\n[y]\nk = m:i\n"


def test_what_a_packer_makes_of_a_project() -> None:
    assert metadata.metadata_headers(PROJECT, "1.0", ["LICENSE"], "2.5") == HEADERS
    least = {"name": "a", "license": {"file": "LICENSE"}}
    rows = ("Metadata-Version: 2.4", "Name: a", "Version: 1", "Description-Content-Type: text/markdown", "")
    assert metadata.metadata_headers(least, "1", [], "2.4") == "\n".join(rows)
    assert (metadata.entry_points_text(PROJECT), metadata.entry_points_text({})) == (COMMANDS, "")
    tree = dict.fromkeys(("in/b.txt", "LICENSE.md", "src/LICENSE", "in/b.md", "LICENSE"), "")
    assert metadata.license_files(PROJECT, tree) == ["LICENSE", "LICENSE.md", "in/b.txt"]
    assert metadata.license_files({}, tree) == []
    assert [metadata.normalized(name) for name in ("Flash-.Moe", "a__b", "c")] == ["flash_moe", "a_b", "c"]
    assert metadata.pinned("A_b==1.0 ; x \\\n  --hash\n# c==2\nd==3;y\n e==4\n") == {"A_b": "1.0", "d": "3"}
    table = '[tool.hatch.build.targets.wheel]\npackages = ["a", "b/c"]\nexclude = ["a/no/", "a/file.py", "*/x/"]\n'
    paths = ["a/f.py", "a/no/f.py", "a/no", "a/file.py", "ab/f.py", "b/c/x/f.py", "a/x/f", "b/d.py", "b/c/d.py"]
    assert metadata.wheel_sources(table.encode(), paths) == ["a/f.py", "a/no", "a/file.py", "b/c/x/f.py", "b/c/d.py"]
    assert [metadata.core_version((table + more).encode()) for more in ("", 'core-metadata-version = "2.1"')] == [
        *("2.5", "2.1")
    ]
    for found, wrong in (
        ("A: 1\nB: 2\n", []),
        ("A: 1\nB:  2\n", ["the bytes"]),
        ("A: 1\nB: 2\nC: 3\n", ["C"]),
        ("A: 1\n", ["B"]),
        ("A: 1\nA: 1\nB: 3\n", ["A", "B"]),
    ):
        assert metadata.differing_headers(found, "A: 1\nB: 2\n") == wrong


INFO = "flash_moe-1.0.dist-info"
NAME = f"{INFO}/sboms/{sbom.NAME}"
STATED: Mapping[str, Any] = {
    "version": "1.0",
    "compilers": {},
    "locks": {},
    "commit": COMMIT,
    "source_date_epoch": 0,
    "targets": [],
}
BODY = {
    f"{INFO}/METADATA": f"{HEADERS}\nlong\n\nmore",
    f"{INFO}/WHEEL": metadata.wheel_text("py3-none-manylinux_2_28_x86_64", "1.33.0"),
    f"{INFO}/entry_points.txt": COMMANDS,
}


def wheel_of(changes: Mapping[str, str | None], file: str = "", version: str = "1.0") -> Any:
    members = {name: text for name, text in {**BODY, **changes}.items() if text is not None}
    names, record = [*members, f"{INFO}/RECORD"], f"{INFO}/RECORD"
    sizes = {name: len(text) for name, text in members.items()}
    members.setdefault(record, metadata.record_text([(name, "h", sizes[name]) for name in members], record))
    wheel = SimpleNamespace(
        names=names,
        digests=dict.fromkeys(names, "h"),
        sizes=sizes,
        path=Path(f"{file or 'flash_moe-1.0-py3-none-manylinux_2_28_x86_64'}.whl"),
    )
    stated = SimpleNamespace(version=version, commit=COMMIT, record=STATED)
    return SimpleNamespace(wheel=wheel, machine="x86_64", stated=stated, read=lambda name: members[name].encode())


EXPECTED = files.Expected("flash_moe", "1.0", {}, HEADERS, "long\n\nmore", True, True, COMMANDS, "1.33.0")


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, ""),
        ({"METADATA": f"{HEADERS.replace('MIT', 'GPL')}\nlong\n\nmore"}, "METADATA License-Expression"),
        ({"METADATA": f"{HEADERS}\nlong"}, "METADATA description"),
        ({"WHEEL": BODY[f"{INFO}/WHEEL"].replace("false", "true")}, "WHEEL Root-Is-Purelib"),
        ({"WHEEL": None}, "WHEEL Generator, WHEEL Root-Is-Purelib, WHEEL Tag, WHEEL Wheel-Version"),
        ({"entry_points.txt": None}, "entry_points.txt"),
        ({"entry_points.txt": f"{COMMANDS}#"}, "entry_points.txt"),
        ({"RECORD": "a,sha256=h,1\n"}, "RECORD"),
    ],
)
@pytest.mark.parametrize("is_sure", [True, False])
def test_generated_metadata(changes: dict[str, str | None], wrong: str, is_sure: bool) -> None:
    given = wheel_of({f"{INFO}/{name}": text for name, text in changes.items()})
    check = files._check_metadata(given, replace(EXPECTED, is_description_sure=is_sure))
    if wrong == "METADATA description" and not is_sure:
        why = "The commit makes it by another flashmoe_tools/links.py than this verifier's, so its text can be neither proved nor refuted here."
        found, step = "the long description is not README.md with our links", "verify with the flashmoe of that commit"
        assert told(check) == ("UNPROVED", found, "the same", why, step)
    elif wrong:
        why = "pip installs what METADATA requires, and makes commands of the entry points."
        step = "do not install this file; build the commit yourself"
        assert told(check) == ("FAIL", wrong, "what a build of the commit writes", why, step)
    else:
        every = "METADATA, WHEEL, RECORD, entry_points.txt are what a build of the commit writes"
        assert told(check) == ("PASS", every, "", "", "")


@pytest.mark.parametrize(
    ("file", "version", "is_right"), [("", "1.0", True), ("other-1.0", "1.0", False), ("", "1.1", False)]
)
def test_the_name(file: str, version: str, is_right: bool) -> None:
    check = files._check_name(wheel_of({}, file, version), EXPECTED)
    if is_right:
        assert told(check) == ("PASS", "flash_moe 1.0", "", "", "")
    else:
        name = file or "flash_moe-1.0-py3-none-manylinux_2_28_x86_64"
        found = f"{name}.whl, which states version {version}"
        assert told(check)[:3] == ("FAIL", found, "flash_moe-1.0-py3-none-manylinux_2_28_x86_64.whl")


@pytest.mark.parametrize("is_sure", [True, False])
@pytest.mark.parametrize("texts", [{}, {NAME: "{}"}, {NAME: "["}, {NAME: "right"}, {NAME: "right", f"b{NAME}": "{}"}])
def test_the_bill(monkeypatch: pytest.MonkeyPatch, texts: dict[str, str], is_sure: bool) -> None:
    monkeypatch.setattr(files.sbom, "bill", lambda record: {"of": dict(record)["version"]})
    right = {name: '{"of": "1.0"}' if text == "right" else text for name, text in texts.items()}
    check = files._check_bill(wheel_of(right), replace(EXPECTED, is_bill_sure=is_sure))
    word = "PASS" if texts == {NAME: "right"} else "FAIL" if is_sure else "UNPROVED"
    step = {
        "PASS": "",
        "FAIL": "do not install this file; build the commit yourself",
        "UNPROVED": "verify with the flashmoe of that commit",
    }
    found = (
        "says what provenance.json says"
        if word == "PASS"
        else f"{sbom.NAME} is not what a build makes of provenance.json"
    )
    assert told(check)[:3] + told(check)[4:] == (word, found, "" if word == "PASS" else "the same", step[word])


@pytest.mark.parametrize("number", [1, 8, 9, 12])
def test_a_list_of_names(number: int) -> None:
    names = [f"n{one}\n" for one in range(number)]
    shown = ", ".join(f"n{one}\\n" for one in range(min(number, 8)))
    assert files._listed(names) == shown + (f" and {number - 8} more" if number > 8 else "")


LIBRARY = "flashmoe/libflashmoe.so"


@pytest.mark.parametrize(
    ("differing", "cxx", "verdict", "found"),
    [
        ((), "g++ 1", "FAIL", "differs in the archive around its members"),
        ((), "g++ 2", "FAIL", "differs in the archive around its members"),
        ((LIBRARY,), "g++ 1", "FAIL", f"differs in {LIBRARY}"),
        ((LIBRARY, "a.dist-info/RECORD", "flashmoe/provenance.json", "x.cdx.json"), "g++ 2", "UNPROVED",
         f"differs in a.dist-info/RECORD, {LIBRARY}, flashmoe/provenance.json, x.cdx.json"),
        ((LIBRARY, "a\n.py"), "g++ 2", "FAIL", f"differs in a\\n.py, {LIBRARY}"),
        (tuple(f"m{one}" for one in range(9)), "g++ 2", "FAIL", f"differs in {', '.join(f'm{one}' for one in range(8))}"),
    ],
)  # fmt: skip
def test_a_rebuilt_wheel(differing: tuple[str, ...], cxx: str, verdict: str, found: str) -> None:
    def side(digest: str, compiler: str) -> Any:
        members = {"same": "s", **dict.fromkeys(differing, digest)}
        return SimpleNamespace(sha256=digest, members=members, cubins={}, stated=SimpleNamespace(cxx=compiler))

    none, check = rebuild.compare(side("1", "g++ 1"), side("2", cxx))
    assert told(none)[:2] == ("PASS", "a build for the CPU only has none")
    assert told(check)[:3] == (verdict, found, "the same")
    assert ("by g++ 1; here it was g++ 2" in check.why) is (verdict == "UNPROVED")
    same = rebuild.compare(side("1", "g++ 1"), side("1", cxx))[1]
    assert told(same)[:2] == ("PASS", "byte for byte the same, sha256 1")


def test_rebuilt_binaries() -> None:
    mine = {f"k{one:02}": "a" * 64 for one in range(30)}
    (check,) = rebuild._compare_cubins(mine, mine)
    assert told(check)[:2] == ("PASS", "30 of 30 have the same sha256")
    wrong = rebuild._compare_cubins({**mine, "k00": "b" * 64, "k01": ""}, {**mine, "new": "c" * 64})
    assert [(one.name[22:], one.found, one.expected) for one in wrong] == [
        *(("k00", "b" * 16, "a" * 16), ("k01", "", "a" * 16), ("new", "not in the wheel", "c" * 16))
    ]
    assert len(rebuild._compare_cubins(mine, {})) == 20


@pytest.mark.parametrize(("machine", "here"), [("x86_64", "x86_64"), ("aarch64", "x86_64")])
@pytest.mark.parametrize("found", ["", "/bin/g++"])
def test_the_environment_of_a_rebuild(monkeypatch: pytest.MonkeyPatch, machine: str, here: str, found: str) -> None:
    asked: list[str] = []
    monkeypatch.setattr(rebuild.platform, "machine", lambda: here)
    monkeypatch.setattr(rebuild, "find_compiler", lambda _, __, prefix: asked.append(prefix) or found)
    given: Any = SimpleNamespace(machine=machine, stated=SimpleNamespace(targets=("sm_80", "sm_90a"), cxx=""))
    built = rebuild.build_environment(given, {"KEPT": "1", **dict.fromkeys((*rebuild.DROPPED, "GIT_DIR"), "x")})
    own = {} if machine == here else {"FLASHMOE_PLATFORM": machine}
    own |= {"CXX": found} if found else {}
    neutral = rebuild.neutral_environment({})
    assert built == {"KEPT": "1", **neutral, "FLASHMOE_ARCHS": "sm_80,sm_90a", **own}
    assert asked == ["" if machine == here else f"{machine}-linux-gnu-"]
    given.stated.targets = ()
    assert rebuild.build_environment(given, {})["FLASHMOE_ARCHS"] == "none"


@pytest.mark.parametrize("error", [VerifyError("v"), ValueError("x" * 300), None])
def test_content_that_cannot_be_read(error: Exception | None) -> None:
    def check() -> list[Check]:
        if error is not None:
            raise error
        return []

    found = {VerifyError: "v", ValueError: f"cannot be read (ValueError: {'x' * 200})"}
    words = [("FAIL", found[type(error)], "readable content")] if error else []
    assert [told(one)[:3] for one in content.guarded("name", check)] == words


@pytest.mark.parametrize(
    ("version", "partial"), [("1", ""), ("1+sm80", "sm80"), ("1.dev0+g1.sm80", "sm80"), ("1+xsm80", ""), ("1+sm8", "")]
)
def test_a_wheel_for_some_targets(monkeypatch: pytest.MonkeyPatch, version: str, partial: str) -> None:
    monkeypatch.setattr(content, "partial_label", lambda _: "sm80")
    given: Any = {
        "version": version,
        "targets": (),
        **dict.fromkeys(("commit", "cxx", "platform"), ""),
        "dirty": False,
        "epoch": 0,
    }
    assert content.Stated(**given, locks={}, compilers={}, record={}).partial == partial


@pytest.mark.parametrize(("named", "is_there", "is_same"), [("a.md", 1, 1), (None, 1, 1), (None, 1, 0), (None, 0, 0)])
def test_by_which_rule_a_description_is_made(
    monkeypatch: pytest.MonkeyPatch, named: str | None, is_there: int, is_same: int
) -> None:
    own = Path(files.links.__file__).read_bytes()
    held = {"a.md": b"A", "README.md": b"R", **({files.LINKS: own if is_same else b""} if is_there else {})}
    commit: Any = SimpleNamespace(digest=COMMIT, tree={name: name for name in held})
    objects: Any = SimpleNamespace(read=lambda asked: {one: held[one] for one in asked})
    monkeypatch.setattr(files.links, "long_description", lambda *given: ", ".join(given))
    project = {"urls": {"Source": "s"}, **({"readme": named} if named else {})}
    made = files._description(objects, commit, project, "1.0")
    assert made == (("A", True) if named else ("R, 1.0, s", bool(is_same)))
    assert files._description(objects, commit, {}, "1.0")[0] == "R, 1.0, "


def test_whose_configuration_git_reads() -> None:
    mine = (
        "GIT_CONFIG_GLOBAL",
        "GIT_CONFIG_SYSTEM",
        "GIT_CONFIG_NOSYSTEM",
        "GIT_CONFIG_COUNT",
        "GIT_CONFIG_KEY_0",
        "GIT_CONFIG_VALUE_12",
    )
    others = ("GIT_DIR", "GIT_CONFIG", "GIT_CONFIG_KEY_", "GIT_SSH_COMMAND", "GIT_CONFIG_COUNT_1", "GIT_EXTERNAL_DIFF")
    environ = dict.fromkeys((*mine, *others, "GIT_CEILING_DIRECTORIES", "PATH", "LC_ALL"), "x")
    kept = dict.fromkeys((*mine, "GIT_CEILING_DIRECTORIES", "PATH"), "x")
    assert repository._callers(environ) == {**kept, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    assert repository.neutral_environment(environ) == {"PATH": "x", **repository._NEUTRAL}


RIGHT: dict[str, Any] = {
    "schema": content.SCHEMA, "version": "1", "commit": "c", "dirty": False, "source_date_epoch": 1, "platform": "p", "targets": ["t"],
    "locks": {"a": "b"}, "compilers": {"cxx": "g"}, "binaries": [{"name": "n", "target": "t", "sha256": "s"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""), ({"schema": "other"}, "no record"), *((text, "no record") for text in (b"[]", b"[", b"")),
        *(({name: value}, f"{name} is of type {type(value).__name__}, not {type(RIGHT[name]).__name__}") for name, value in
          (("version", 1), ("commit", None), ("dirty", 0), ("source_date_epoch", True), ("platform", []), ("targets", "t"), ("locks", []),
          ("compilers", 3), ("binaries", {}))),
        ({"targets": ["t", 1]}, "targets holds something that is no name"), ({"locks": {"a": 1}}, "locks.a is of type int, not str"),
        ({"compilers": {"cxx": "g", "x": 1}}, "compilers.x is of type int, not str"), ({"compilers": {}}, "compilers.cxx is of type NoneType, not str"),
        ({"binaries": [3]}, "binaries.name is of type NoneType, not str"),
        ({"binaries": [{"name": "n", "target": "t"}]}, "binaries.sha256 is of type NoneType, not str"),
    ],
)  # fmt: skip
def test_a_provenance(change: Any, told: str) -> None:
    given = change if isinstance(change, bytes) else json.dumps({**RIGHT, **change}).encode()
    if not told:
        stated = content.read_stated(given, "a.whl")
        assert (stated.epoch, stated.cxx, stated.targets, stated.locks) == (1, "g", ("t",), {"a": "b"})
        with pytest.raises(VerifyError, match=r"a\.whl has no readable"):
            content.read_stated(None, "a.whl")
    else:
        words = (
            "a.whl has no readable flashmoe/provenance.json"
            if told == "no record"
            else f"flashmoe/provenance.json: {told}"
        )
        with pytest.raises(VerifyError) as caught:
            content.read_stated(given, "a.whl")
        assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    "answer", [b"", b"A missing\n", b"B blob 1\nx\n", b"A tree 1\nx\n", b"A blob 1", b"A blob 1\nx\nB tree 1\ny\n"]
)
def test_an_answer_of_git_that_is_no_file(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    objects, asked = repository.Objects.__new__(repository.Objects), list[bytes]()
    monkeypatch.setattr(
        objects, "_git", lambda *_, given: asked.append(given) or b"A blob 2\nx\n\nB blob 0\n\n", raising=False
    )
    assert objects.read(iter("ABA")) == {"A": b"x\n", "B": b""}
    assert asked == [b"A\nB\n"]
    monkeypatch.setattr(objects, "_git", lambda *_, given: answer, raising=False)
    with pytest.raises(VerifyError, match=r"the clone lacks object [AB]; a whole clone has it"):
        objects.read("AB"[: 2 if b"A blob" in answer else 1])
