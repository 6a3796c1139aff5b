"""Which library is loaded: the one in the variable, the package's, or in a checkout the one of the last build."""

from pathlib import Path

import pytest

from flashmoe import _extension
from flashmoe.errors import ExtensionError


def test_an_editable_install_loads_what_the_checkout_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_extension.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(_extension, "__file__", str(tmp_path / "flashmoe" / "_extension.py"))
    built = tmp_path / "build" / "lib" / _extension.LIBRARY_NAME
    for folder in (built.parent, tmp_path / "flashmoe"):
        folder.mkdir(parents=True)
    built.write_bytes(b"")
    with pytest.raises(ExtensionError, match="nox -s build"):
        _extension.library_path()  # not a checkout: a folder called build proves nothing
    (tmp_path / "flashmoe_build").mkdir()
    assert _extension.library_path() == built
    own = tmp_path / "flashmoe" / _extension.LIBRARY_NAME
    own.write_bytes(b"")
    assert _extension.library_path() == own
