"""Presets: what a named GPU can run, applied to a suite."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from flashmoe_tools.bench.suites import Suite
from flashmoe_tools.operations import Problem
from flashmoe_tools.operations.fields import SuiteError
from flashmoe_tools.toml import tomllib


@dataclass(frozen=True)
class Preset:
    name: str
    products: tuple[str, ...]
    dtypes: tuple[str, ...]
    max_tokens: int
    without: tuple[str, ...]
    baseline: str


def load_presets() -> tuple[Preset, ...]:
    with (Path(__file__).resolve().parent / "presets.toml").open("rb") as stream:
        rows = tomllib.load(stream)["preset"]
    return tuple(
        Preset(
            name=row["name"],
            products=tuple(row["products"]),
            dtypes=tuple(row["dtypes"]),
            max_tokens=row["max_tokens"],
            without=tuple(row["without"]),
            baseline=row["baseline"],
        )
        for row in rows
    )


def find_preset(name: str, device_name: str) -> Preset | None:
    """The preset called ``name``; with ``auto`` the one whose product word appears in ``device_name``, if any."""
    presets = load_presets()
    if name == "auto":
        words = set(re.split(r"[^A-Za-z0-9]+", device_name))
        return next((one for one in presets if words & set(one.products)), None)
    for preset in presets:
        if preset.name.lower() == name.lower():
            return preset
    msg = f"no preset {name!r}; known: auto, {', '.join(one.name for one in presets)}"
    raise SuiteError(msg)


def apply_preset(suite: Suite, preset: Preset | None) -> Suite:
    """``suite`` with dtypes, batch sizes, contenders and baseline that the GPU can run."""
    if preset is None or suite.kind != "operation":
        return suite
    cases: dict[str, Problem] = {}
    quick = set()
    for case in suite.cases:
        fitted = case.fit(preset.dtypes, preset.max_tokens)
        cases.setdefault(fitted.key, fitted)
        if case.key in suite.quick_keys:
            quick.add(fitted.key)
    contenders = tuple(one for one in suite.contenders if one not in preset.without)
    baseline = preset.baseline if suite.baseline in preset.without else suite.baseline
    if baseline not in contenders:
        contenders = (*contenders, baseline)
    only = {case.key: case for case in (one.fit(preset.dtypes, preset.max_tokens) for one in suite.quick_only)}
    return replace(
        suite,
        cases=tuple(cases.values()),
        quick_keys=frozenset(quick),
        quick_only=tuple(only.values()),
        contenders=contenders,
        baseline=baseline,
    )
