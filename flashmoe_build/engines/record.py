"""recorded.json: the findings for each pinned version, for the tests and docs/integrations.md; and the page's table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe_build.engines.clauses import ENGINES
from flashmoe_build.engines.contract import Found, Ours, differences
from flashmoe_build.engines.signatures import Signature, names, parse, signature
from flashmoe_build.engines.wheels import members_of
from flashmoe_build.program import ROOT

RECORD = Path(__file__).with_name("recorded.json")
ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
RAN_ON_A_GPU = {  # see docs/notebook
    ("vllm", "0.24.0"): "attention, H100 and H200; latents and experts, H200",
    ("sglang", "0.5.23"): "attention, H200",
}


@dataclass(frozen=True)
class Version:
    engine: str
    version: str
    torch: str
    found: Mapping[str, Found]


def _source(name: str) -> tuple[str, str]:
    """For "module:path": the module's text in this checkout, and the path."""
    module, _, path = name.partition(":")
    file = next((ROOT / member for member in members_of(module) if (ROOT / member).is_file()), None)
    return ("" if file is None else file.read_text(encoding="utf-8")), path


OURS = Ours(lambda name: signature(*_source(name)), lambda name: names(*_source(name)))


def load(path: Path = RECORD) -> list[Version]:
    """The recorded versions. The file stores for each only what differs from the engine's version before it."""
    found: dict[str, dict[str, Found]] = {engine: {} for engine in ENGINES}
    versions = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        found[row["engine"]] |= {name: _decoded(value) for name, value in row["found"].items()}
        versions.append(Version(row["engine"], row["version"], row["torch"], dict(found[row["engine"]])))
    return versions


def save(versions: Sequence[Version], path: Path = RECORD) -> None:
    rows, before = [], {engine: dict[str, Found]() for engine in ENGINES}
    for one in versions:
        known = before[one.engine]
        new = {name: _encoded(value) for name, value in sorted(one.found.items()) if (name, value) not in known.items()}
        rows.append({"engine": one.engine, "version": one.version, "torch": one.torch, "found": new})
        before[one.engine] = {**known, **one.found}
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _encoded(found: Found) -> str | None:
    return str(found) if isinstance(found, Signature) else None if found is None else " ".join(sorted(found))


def _decoded(text: str | None) -> Found:
    if text is None:
        return None
    return parse(text) if text.startswith("(") else frozenset(text.split())


def table(versions: Sequence[Version] | None = None) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Rows for docs/integrations.md: which parts of the contract hold in each recorded version."""
    rows: list[Sequence[str]] = []
    for one in load() if versions is None else versions:
        clauses = ENGINES[one.engine]
        wrong = {clause.part for clause, _ in differences(clauses, one.version, one.found, OURS)}
        cells = [
            "none" if not any(clause.part == part for clause in clauses) else "differs" if part in wrong else "holds"
            for part in ("attention", "experts")
        ]
        ran = RAN_ON_A_GPU.get((one.engine, one.version), "no")
        rows.append((f"{ENGINE_NAMES[one.engine]} {one.version}", one.torch, *cells, ran))
    return ("engine", "its torch", "attention", "experts", "run inside it on a GPU"), rows
