"""Applies rules to numbers to get a diagnosis. Pure."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flashmoe.errors import ArgumentError
from flashmoe_tools.toml import tomllib

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {"<": operator.lt, ">": operator.gt, "=": operator.eq}


@dataclass(frozen=True)
class Rule:
    """``when``: (number, operator, bound), all of which must hold."""

    id: str
    when: tuple[tuple[str, str, float], ...]
    says: str
    do: str

    def fires(self, values: Mapping[str, float]) -> bool:
        return all(name in values and OPERATORS[sign](values[name], bound) for name, sign, bound in self.when)

    def evidence(self, values: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {values[name]:.3g} {sign} {bound:g}" for name, sign, bound in self.when)


@dataclass(frozen=True)
class Finding:
    """A rule that fired, with the numbers that made it fire."""

    rule: str
    says: str
    evidence: str
    do: str


@lru_cache(maxsize=1)
def load_rules() -> tuple[Rule, ...]:
    with (Path(__file__).resolve().parent / "rules.toml").open("rb") as stream:
        return parse_rules(tomllib.load(stream))


def parse_rules(table: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Raises ArgumentError for an unknown operator or a rule without a condition."""
    rules = []
    for row in table["rule"]:
        when = tuple((str(name), str(sign), float(bound)) for name, sign, bound in row["when"])
        if not when or any(sign not in OPERATORS for _, sign, _ in when):
            msg = f"rule {row['id']!r}: conditions are [number, operator, bound] with one of {', '.join(OPERATORS)}"
            raise ArgumentError(msg)
        rules.append(Rule(row["id"], when, row["says"], row["do"]))
    return tuple(rules)


def diagnose(values: Mapping[str, float], rules: tuple[Rule, ...] | None = None) -> tuple[Finding, ...]:
    """Every rule that fires, in order; the first is the diagnosis."""
    return tuple(
        Finding(rule.id, rule.says, rule.evidence(values), rule.do)
        for rule in (rules if rules is not None else load_rules())
        if rule.fires(values)
    )
