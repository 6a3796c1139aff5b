"""The version of a build, the check of a release's tag, and the statement about published files."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from release_builders import git, provenance_of

from flashmoe.errors import BuildError
from flashmoe_build.environments.lock import read_lock
from flashmoe_build.release import version
from flashmoe_build.release.statement import statement, write_statement
from flashmoe_tools.tables import load_tables
from flashmoe_tools.versions import stated_version, version_of, with_version

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    ("commit", "dirty", "tags", "expected"),
    [
        (COMMIT, False, ("v0.1.0",), "0.1.0"),
        (COMMIT, False, ("v0.2.0", "other"), "0.1.0.dev0+g0123456789ab"),
        (COMMIT, False, (), "0.1.0.dev0+g0123456789ab"),
        (COMMIT, True, ("v0.1.0",), "0.1.0.dev0+g0123456789ab.dirty"),
        ("unknown", True, (), "0.1.0.dev0+unknown.dirty"),
    ],
)
def test_only_a_clean_tagged_commit_is_a_release(
    commit: str, dirty: bool, tags: tuple[str, ...], expected: str
) -> None:
    assert version_of("0.1.0", commit, dirty=dirty, tags=tags) == expected


def test_a_wheel_for_some_targets_has_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file name differs from the full wheel's, which it would otherwise silently replace."""
    full = version.project_version(archs="all")
    labels = {"90a": "sm90a", "none": "cpu", "75,80,90a": "sm75.sm80.sm90a", "75,80,86,90a": "4targets"}
    for request, label in labels.items():
        found = version.project_version(archs=request)
        assert found.removeprefix(full).lstrip("+.") == label
        monkeypatch.setenv("FLASHMOE_ARCHS", request)
        assert version.project_version() == found
    everything = ",".join(target.name for target in load_tables().targets)
    assert version.project_version(archs=everything) == full
    assert version_of("0.1.0", COMMIT, dirty=False, tags=("v0.1.0",), partial="sm90a") == "0.1.0+sm90a"


def test_the_versions_line_is_all_that_changes() -> None:
    text = '"""Words."""\n\n__version__ = "0.1.0"\nOTHER = "0.1.0"\n'
    assert stated_version(text) == "0.1.0"
    assert with_version(text, "2.0") == text.replace('_ = "0.1.0"', '_ = "2.0"')
    assert stated_version("") == ""


@pytest.fixture
def checkout(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FLASHMOE_ARCHS", raising=False)
    return Path(shutil.copytree(clone, tmp_path / "clone"))


def test_a_release_fails_unless_the_tag_is_the_version(checkout: Path) -> None:
    with pytest.raises(BuildError, match=r"a build of this checkout is 0\.1\.0\.dev0\+g"):
        version.check_release("v0.1.0", checkout)
    git(checkout, "tag", "v0.1.0")
    assert version.check_release("v0.1.0", checkout) == "0.1.0"
    for other in ("v0.1.1", "0.1.0", "v0.1.0rc1"):
        with pytest.raises(BuildError, match="is not the version"):
            version.check_release(other, checkout)
    (checkout / "new.py").write_text("")
    with pytest.raises(BuildError, match=r"\.dirty, not 0\.1\.0"):
        version.check_release("v0.1.0", checkout)


def test_an_sdist_remembers_its_tag(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "tag", "v0.1.0")
    record = version.commit_json(version.find_commit(checkout))
    shutil.rmtree(checkout / ".git")
    assert version.project_version(checkout) == "0.1.0.dev0+unknown.dirty"
    (checkout / version.COMMIT_FILE).write_text(record)
    assert version.project_version(checkout) == "0.1.0"


def test_the_statement_names_every_hash_of_the_lock_and_no_address(library: bytes, clone: Path, tmp_path: Path) -> None:
    digest = "ab" * 32
    (tmp_path / "lockfiles").mkdir()
    lock = tmp_path / "lockfiles" / "build.txt"
    lock.write_text(f"torch==2.10.0 \\\n    --hash=sha256:{digest}\nninja==1.0 \\\n    --hash=sha256:{'cd' * 32}\n")
    record = provenance_of(library, clone, locks={"build.txt": hashlib.sha256(lock.read_bytes()).hexdigest()})
    (tmp_path / "dist").mkdir()
    with pytest.raises(BuildError, match="contains no wheel"):
        write_statement(tmp_path / "dist", tmp_path, tmp_path)
    (tmp_path / "dist" / "a.whl").write_bytes(b"wheel")
    with pytest.raises(BuildError, match="cannot be read"):
        write_statement(tmp_path / "dist", tmp_path, tmp_path)
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    written = json.loads(write_statement(tmp_path / "dist", tmp_path, tmp_path).read_text())
    assert written == statement(record, [tmp_path / "dist" / "a.whl"], read_lock(lock))
    assert written["_type"] == "https://in-toto.io/Statement/v1"
    assert written["subject"] == [{"name": "a.whl", "digest": {"sha256": hashlib.sha256(b"wheel").hexdigest()}}]
    definition = written["predicate"]["buildDefinition"]
    found = {entry["name"]: entry["digest"] for entry in definition["resolvedDependencies"]}
    assert found["torch==2.10.0"] == {"sha256": digest}
    assert found["sources"] == {"gitCommit": record["commit"]}
    assert "://" not in json.dumps(definition)
    assert len(written["predicate"]["runDetails"]["byproducts"]) == 1 + len(record["binaries"])
    lock.write_text("")
    with pytest.raises(BuildError, match="not the one of the last build"):
        write_statement(tmp_path / "dist", tmp_path, tmp_path)
