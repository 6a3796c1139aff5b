"""The messages of `verify` for every condition that no test of a complete wheel would notice."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe.errors import ArgumentError
from flashmoe_tools import sbom
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.verify import cli, content, files, metadata, rebuild, repository, signature
from flashmoe_tools.verify.errors import VerifyError

COMMIT = "c" * 40
FOUND = SimpleNamespace(digest=COMMIT, epoch=7, tree={})


def message(check: Check) -> tuple[str, ...]:
    return (check.verdict.name, check.found, check.expected, check.why, check.next_step)


def of(**stated: Any) -> Any:
    """Content with these facts."""
    return SimpleNamespace(stated=SimpleNamespace(**{"commit": COMMIT, "dirty": False, "epoch": 7, **stated}))


SHOWN = COMMIT[:12]


def test_what_was_not_asked_for() -> None:
    (rebuilt,) = cli.check_rebuild(of(), None, cli.Request(), Path())
    signed = cli.check_bundle(of(), cli.Request())
    found = "not requested: the compiled library was compared with the wheel's own record only"
    assert message(rebuilt) == ("SKIP", found, "", "", "--rebuild, in a clone")
    step = "--bundle FILE --identity WHO --issuer WHERE"
    assert message(signed) == ("SKIP", "no bundle given: who built it is unknown", "", "", step)
    clone: Any = SimpleNamespace()
    for requested, commit in ((cli.Request(again=True), FOUND), (cli.Request(clone, again=True), None)):
        with pytest.raises(VerifyError, match="--rebuild needs a clone"):
            cli.check_rebuild(of(), commit, requested, Path())
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
        (b"GCC: 12.2.0", {"cxx": "g++ 13"}, ("FAIL", "x86_64, g++ 13", "x86_64, g++ 12.2.0, as in the library")),
        (None, {}, ("FAIL", "x86_64, g++ 12.2.0", "x86_64, a compiler, as in the library")),
    ],
)  # fmt: skip
def test_the_host(
    monkeypatch: pytest.MonkeyPatch, notes: bytes | None, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(content, "open_elf", lambda *_: None)
    monkeypatch.setattr(content, "section_data", lambda *_: notes)
    stated = {"platform": "x86_64", "cxx": "g++ 12.2.0", "record": {"schema": 1}, "compilers": {"cxx": ""}, **changes}
    given: Any = SimpleNamespace(stated=SimpleNamespace(**stated), machine="x86_64", read=lambda _: b"")
    assert message(content.check_host(given))[:3] == words


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


@pytest.mark.parametrize("text", ["", "{}", "[", "right"])
@pytest.mark.parametrize("is_sure", [True, False])
def test_the_bill(monkeypatch: pytest.MonkeyPatch, text: str, is_sure: bool) -> None:
    monkeypatch.setattr(files.sbom, "bill", dict)
    held = {f"a.dist-info/sboms/{sbom.NAME}": '{"version": "1.0"}' if text == "right" else text} if text else {}
    stated, wheel = SimpleNamespace(record={"version": "1.0"}), SimpleNamespace(names=[*held])
    given: Any = SimpleNamespace(wheel=wheel, stated=stated, read=lambda name: held[name].encode())
    check = files._check_bill(given, SimpleNamespace(is_bill_sure=is_sure))  # type: ignore[arg-type]
    assert check.verdict.name == ("PASS" if text == "right" else "FAIL" if is_sure else "UNPROVED")


def test_a_rebuilt_wheel_that_differs_around_its_members() -> None:
    def side(digest: str) -> Any:
        return SimpleNamespace(sha256=digest, members={"same": "s"}, cubins={}, stated=SimpleNamespace(cxx="g++ 1"))

    none, check = rebuild.compare(side("1"), side("2"))
    assert message(none)[:2] == ("PASS", "a build for the CPU only has none")
    assert message(check)[:3] == ("FAIL", "differs in the archive around its members", "the same")
    assert message(rebuild.compare(side("1"), side("1"))[1])[:2] == ("PASS", "byte for byte the same, sha256 1")


@pytest.mark.parametrize(("machine", "here"), [("x86_64", "x86_64"), ("aarch64", "x86_64")])
@pytest.mark.parametrize("found", ["", "/bin/g++"])
def test_the_environment_of_a_rebuild(monkeypatch: pytest.MonkeyPatch, machine: str, here: str, found: str) -> None:
    requested: list[str] = []
    monkeypatch.setattr(rebuild.platform, "machine", lambda: here)
    monkeypatch.setattr(rebuild, "find_compiler", lambda _, __, prefix: requested.append(prefix) or found)
    given: Any = SimpleNamespace(machine=machine, stated=SimpleNamespace(targets=("sm_80", "sm_90a"), cxx=""))
    built = rebuild.build_environment(given, {"KEPT": "1", **dict.fromkeys((*rebuild.DROPPED, "GIT_DIR"), "x")})
    own = {} if machine == here else {"FLASHMOE_PLATFORM": machine}
    own |= {"CXX": found} if found else {}
    neutral = rebuild.neutral_environment({})
    assert built == {"KEPT": "1", **neutral, "FLASHMOE_ARCHS": "sm_80,sm_90a", **own}
    assert requested == ["" if machine == here else f"{machine}-linux-gnu-"]
    given.stated.targets = ()
    assert rebuild.build_environment(given, {})["FLASHMOE_ARCHS"] == "none"


def test_a_wheel_for_some_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "partial_label", lambda _: "sm80")
    given: Any = dict.fromkeys(("commit", "cxx", "platform", "dirty", "epoch"), "") | {"targets": ()}
    for version, partial in (("1.dev0+g1.sm80", "sm80"), ("1.dev0+g1", "")):
        assert content.Stated(**given, version=version, locks={}, compilers={}, record={}).partial == partial


@pytest.mark.parametrize(("named", "is_there", "is_same"), [("a.md", 1, 1), (None, 0, 0)])
def test_by_which_rule_a_description_is_made(
    monkeypatch: pytest.MonkeyPatch, named: str | None, is_there: int, is_same: int
) -> None:
    own = Path(files.links.__file__).read_bytes()
    held = {"a.md": b"A", "README.md": b"R", **({files.LINKS: own if is_same else b""} if is_there else {})}
    commit: Any = SimpleNamespace(digest=COMMIT, tree={name: name for name in held})
    objects: Any = SimpleNamespace(read=lambda requested: {one: held[one] for one in requested})
    monkeypatch.setattr(files.links, "long_description", lambda *given: ", ".join(given))
    project = {"urls": {"Source": "s"}, **({"readme": named} if named else {})}
    made = files._description(objects, commit, project, "1.0")
    assert made == (("A", True) if named else ("R, 1.0, s", bool(is_same)))
    assert files._description(objects, commit, {}, "1.0")[0] == "R, 1.0, "


def test_a_record_of_another_schema() -> None:
    right: dict[str, Any] = {
        "schema": content.SCHEMA,
        "version": "1",
        "commit": "c",
        "dirty": False,
        "source_date_epoch": 1,
        "platform": "p",
        "targets": ["t"],
        "locks": {},
        "compilers": {"cxx": "g"},
        "binaries": [],
    }
    assert content.read_stated(json.dumps(right).encode(), "a.whl").targets == ("t",)
    with pytest.raises(VerifyError, match=r"^a\.whl has no readable flashmoe/provenance\.json"):
        content.read_stated(json.dumps({**right, "schema": "other"}).encode(), "a.whl")


@pytest.mark.parametrize("answer", [b"B blob 1\nx\n", b"A blob 1"])
def test_an_answer_of_git_that_is_no_file(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    objects, requested = repository.Objects.__new__(repository.Objects), list[bytes]()
    monkeypatch.setattr(
        objects, "_git", lambda *_, given: requested.append(given) or b"A blob 2\nx\n\nB blob 0\n\n", raising=False
    )
    assert objects.read(iter("ABA")) == {"A": b"x\n", "B": b""}
    assert requested == [b"A\nB\n"]
    monkeypatch.setattr(objects, "_git", lambda *_, given: answer, raising=False)
    with pytest.raises(VerifyError, match=r"the clone lacks object [AB]; a whole clone has it"):
        objects.read("AB"[: 2 if b"A blob" in answer else 1])
