"""The cache's key changes with everything that can change the output, and damaged entries are never used."""

import errno
import multiprocessing
import time
from pathlib import Path

import pytest

from flashmoe.errors import BuildError
from flashmoe_build.compile.cache import Cache, content_key, include_closure

SOURCE = '#include "a.cuh"\nint main();\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.cuh").write_text('#include "sub/b.cuh"\n')
    (tmp_path / "sub" / "b.cuh").write_text('#include "c.cuh"\n#include <cuda_fp16.h>\n')
    (tmp_path / "sub" / "c.cuh").write_text("// leaf\n")
    (tmp_path / "other.cuh").write_text("// not included\n")
    return tmp_path


def key(tree: Path, text: str = SOURCE, **facts: str) -> str:
    return content_key(text, include_closure(text, [tree]), tree, facts)


def test_closure_follows_includes_of_includes(tree: Path) -> None:
    names = [path.relative_to(tree).as_posix() for path in include_closure(SOURCE, [tree])]
    assert names == ["a.cuh", "sub/b.cuh", "sub/c.cuh"]


def test_key_changes_with_a_deep_header(tree: Path) -> None:
    before = key(tree)
    (tree / "sub" / "c.cuh").write_text("// leaf, edited\n")
    assert key(tree) != before


def test_key_does_not_change_with_an_unrelated_file(tree: Path) -> None:
    before = key(tree)
    (tree / "other.cuh").write_text("// edited\n")
    assert key(tree) == before


def test_key_changes_with_options_and_compiler(tree: Path) -> None:
    keys = {key(tree), key(tree, options="-O3"), key(tree, nvrtc="1"), key(tree, nvrtc="2"), key(tree, SOURCE + " ")}
    assert len(keys) == 5


def test_key_does_not_depend_on_the_folder(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("elsewhere")
    for path in tree.rglob("*.cuh"):
        copy = other / path.relative_to(tree)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    assert key(other) == key(tree)


def test_round_trip(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.load("ab12", ".cubin") is None
    cache.store("ab12", ".cubin", b"binary", {"log": "words"})
    loaded = cache.load("ab12", ".cubin")
    assert loaded is not None
    assert loaded[0] == b"binary"
    assert loaded[1]["log"] == "words"


def make_slowly(folder: str, log: str) -> None:
    def make() -> tuple[bytes, dict[str, str]]:
        with Path(log).open("a") as stream:
            stream.write("made\n")
        time.sleep(0.2)
        return b"binary", {}

    assert Cache(Path(folder)).get("ab12", ".o", make)[0] == b"binary"


def test_what_two_builds_want_is_made_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    builds = [context.Process(target=make_slowly, args=(str(tmp_path / "cache"), str(log))) for _ in range(3)]
    for build in builds:
        build.start()
    for build in builds:
        build.join(30)
    assert [build.exitcode for build in builds] == [0, 0, 0]
    assert log.read_text() == "made\n"


def test_what_failed_is_made_by_the_next(tmp_path: Path) -> None:
    def fail() -> tuple[bytes, dict[str, str]]:
        msg = "compiler"
        raise BuildError(msg)

    cache = Cache(tmp_path)
    with pytest.raises(BuildError, match="compiler"):
        cache.get("ab12", ".o", fail)
    assert cache.get("ab12", ".o", lambda: (b"binary", {}))[2] is False
    assert cache.get("ab12", ".o", fail)[::2] == (b"binary", True)


@pytest.mark.parametrize("damage", [b"", b"binarx", b"binary and more"])
def test_damaged_output_is_not_used(tmp_path: Path, damage: bytes) -> None:
    cache = Cache(tmp_path)
    cache.store("ab12", ".cubin", b"binary", {})
    cache.path("ab12", ".cubin").write_bytes(damage)
    assert cache.load("ab12", ".cubin") is None


def test_damaged_facts_are_not_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.store("ab12", ".cubin", b"binary", {})
    cache.path("ab12", ".json").write_text("{")
    assert cache.load("ab12", ".cubin") is None


def test_a_full_disk_leaves_no_half_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match="No space left"):
            Cache(tmp_path).store("ab12", ".cubin", b"binary", {})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
