"""The audit's rules, read from data/policy.toml."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashmoe.errors import TableError
from flashmoe_tools.toml import tomllib

DATA = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True)
class Policy:
    """Reasons by name; ``versions`` holds the floor's highest version of each family."""

    floor: str
    versions: Mapping[str, str]
    needed: Mapping[str, str]
    refused: Mapping[str, str]
    exports: Mapping[str, str]
    weak: Mapping[str, str]


@lru_cache(maxsize=4)
def load_policy(path: Path = DATA / "policy.toml") -> Policy:
    """Reads the rules; raises TableError if the file is missing or damaged."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return Policy(**{name: table[name] for name in ("floor", "versions", "needed", "refused", "exports", "weak")})
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        msg = f"the audit's rules ({path.name}) cannot be read: {error!r}; reinstall the package"
        raise TableError(msg) from error


def version_key(text: str) -> tuple[int, ...]:
    """``3.4.24`` -> (3, 4, 24); a word such as ``PRIVATE`` sorts above every number."""
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (1_000_000,)
