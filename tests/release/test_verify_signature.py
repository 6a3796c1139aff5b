"""`verify --bundle`: a signature is checked against the given identity and the file."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from release_builders import clone_of

from flashmoe.__main__ import main
from flashmoe.errors import ExitCode
from flashmoe_tools.report import Verdict
from flashmoe_tools.verify.cli import Request, verify
from flashmoe_tools.verify.signature import judge_statement

WheelMaker = Callable[..., Path]


@dataclass
class FakeSigstore:
    """A fake of the library: it records its arguments and returns the given result."""

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
    bundle.write_text("[")
    assert signed(wheel, bundle, clone) == ExitCode.FAILED
    assert "bundle.json is no sigstore bundle (JSONDecodeError: " in capsys.readouterr().err


def test_a_bundle_without_an_identity_is_an_error(
    make_wheel: WheelMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["--identity", "us"], ["--issuer", "them"]):
        assert main(["verify", str(make_wheel()), "--bundle", str(tmp_path), *words]) == ExitCode.USAGE
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


def test_a_statement_of_another_kind_names_no_subject() -> None:
    payload = json.dumps({"subject": [{"digest": {"sha256": "0" * 64}}]}).encode()
    kinds = {
        kind: judge_statement("0" * 64, kind, payload, "us").verdict
        for kind in ("application/vnd.in-toto+json", "text")
    }
    assert kinds == {"application/vnd.in-toto+json": Verdict.PASS, "text": Verdict.FAIL}
