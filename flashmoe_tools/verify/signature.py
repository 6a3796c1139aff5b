"""Who signed a wheel: checks a sigstore bundle against the identity that the caller names (extra ``sign``)."""

import json
from pathlib import Path
from typing import Any

from flashmoe.errors import ArgumentError
from flashmoe_tools.report import Check, Verdict
from flashmoe_tools.verify.content import Content
from flashmoe_tools.verify.errors import VerifyError

IN_TOTO = "application/vnd.in-toto+json"
WHY = "Whoever can replace the wheel can replace what it says of itself, but not this signature."


def check_signature(content: Content, bundle: Path, identity: str, issuer: str, *, offline: bool) -> Check:
    """Checks the bundle's signature, transparency log and certificate identity, and that it is about this file.

    Raises VerifyError for a file that is not a bundle, ModuleNotFoundError if sigstore is not installed.
    """
    from sigstore.errors import VerificationError
    from sigstore.models import Bundle
    from sigstore.verify import Verifier
    from sigstore.verify.policy import Identity

    text = _read(bundle)
    try:
        signed = Bundle.from_json(text)
        has_statement = "dsseEnvelope" in json.loads(text)
    except Exception as error:  # reading an untrusted file may raise anything
        msg = f"{bundle.name} is no sigstore bundle ({type(error).__name__}: {str(error)[:200]})"
        raise VerifyError(msg) from error
    verifier = Verifier.production(offline=offline)
    policy = Identity(identity=identity, issuer=issuer)
    try:
        if not has_statement:
            verifier.verify_artifact(content.wheel.path.read_bytes(), signed, policy)
            return Check("signature", Verdict.PASS, f"{identity} signed this file")
        kind, payload = verifier.verify_dsse(signed, policy)
    except VerificationError as error:
        return Check(
            "signature", Verdict.FAIL, str(error)[:400], f"a signature by {identity}", WHY, "do not install this file"
        )
    return judge_statement(content.sha256, kind, payload, identity)


def judge_statement(sha256: str, kind: str, payload: bytes, identity: str) -> Check:
    """Whether a statement with a valid signature is about this file."""
    try:
        statement = json.loads(payload) if kind == IN_TOTO else {}
        digests = {subject["digest"].get("sha256") for subject in statement["subject"]}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        found = f"a signed statement of kind {kind[:80]!r}, which names no subject"
        return Check(
            "signature", Verdict.FAIL, found, "a statement about this file", WHY, "ask for the wheel's own bundle"
        )
    if sha256 not in digests:
        found = f"{identity} signed a statement about {len(digests)} other files"
        return Check("signature", Verdict.FAIL, found, f"sha256 {sha256}", WHY, "do not install this file")
    return Check(
        "signature", Verdict.PASS, f"{identity} signed {statement.get('predicateType', 'a statement')} of this file"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        msg = f"cannot read the bundle {path.name}: {error}"
        raise VerifyError(msg) from error


def check_options(options: Any) -> None:
    """Raises ArgumentError for a bundle without a required identity: anybody can sign anything."""
    if options.bundle and not (options.identity and options.issuer):
        msg = "--bundle needs --identity and --issuer: a signature by nobody in particular proves nothing"
        raise ArgumentError(msg)
