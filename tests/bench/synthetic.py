"""Samples and reports with known truth, to test the statistics and draw pages."""

import copy
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmoe_tools.bench.cli import only_dtypes
from flashmoe_tools.bench.plan import block_orders
from flashmoe_tools.bench.record import DATA_SCHEMA, cell_checks, cell_record
from flashmoe_tools.bench.runner import Cell, Timing
from flashmoe_tools.bench.suites import Suite, load_suite
from flashmoe_tools.bench.summary import CeilingRates, aggregate
from flashmoe_tools.bench.telemetry import Reading
from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention.problem import AttentionProblem
from flashmoe_tools.report import Check, Report, Verdict

CEILINGS = {"matmul_tflops": {"bf16": 790.0, "f16": 790.0}, "copy_gbps": 2900.0, "samples": {"copy": [1, 2, 3]}}


def machine_noise(
    count: int, rng: np.random.Generator, *, sigma: float, drift: float, phi: float
) -> NDArray[np.float64]:
    """Log slowness of a machine at successive moments: white noise, a slow AR(1) part, a linear drift and a jump.

    ``sigma`` is the standard deviation of each noise, ``drift`` the change from the first to the last moment.
    """
    slow = np.empty(count)
    slow[0] = rng.normal(0.0, sigma)
    steps = rng.normal(0.0, sigma * np.sqrt(1.0 - phi**2), count)
    for index in range(1, count):
        slow[index] = phi * slow[index - 1] + steps[index]
    jump = np.where(np.arange(count) > rng.integers(count // 4, count), drift / 2, 0.0)
    return slow + rng.normal(0.0, sigma, count) + drift * np.linspace(0.0, 1.0, count) + jump


def interleaved_samples(
    change: float,
    rng: np.random.Generator,
    *,
    blocks: int = 30,
    block: int = 10,
    sigma: float = 0.01,
    drift: float = 0.1,
    phi: float = 0.9,
) -> tuple[list[list[float]], list[list[float]]]:
    """(subject, baseline) as the runner would take them; the subject's true time is 100 / (1 + change)."""
    noise = machine_noise(2 * blocks * block, rng, sigma=sigma, drift=drift, phi=phi)
    true = {"subject": 100.0 / (1.0 + change), "baseline": 100.0}
    taken: dict[str, list[list[float]]] = {"subject": [], "baseline": []}
    at = 0
    for order in block_orders(["subject", "baseline"], blocks, int(rng.integers(2**31))):
        for name in order:
            taken[name].append(list(true[name] * np.exp(noise[at : at + block])))
            at += block
    return taken["subject"], taken["baseline"]


def synthetic_report(
    suite_name: str = "llm-prefill", speeds: dict[str, float] | None = None, **settings: Any
) -> Report:
    """A report as a run would write it, which the caller may change.

    ``speeds`` holds each contender's share of an invented top speed; ``settings``: see ``_report``. For ``llm-prefill``
    it only holds the bf16 half.
    """
    speeds = speeds or {"flashmoe": 0.8, "sdpa-flash": 0.5, "sdpa-cudnn": 0.75}
    return copy.deepcopy(_report(suite_name, tuple(speeds.items()), **settings))


@lru_cache
def _report(
    suite_name: str,
    shares: tuple[tuple[str, float], ...],
    *,
    seed: int = 1,
    device: str = "cuda",
    timing: str = "events",
    blocks: int = 10,
    partial: str = "",
    wrong: str = "",
) -> Report:
    """Each is created once, because the intervals of its cells take most of a second."""
    speeds = dict(shares)
    suite: Suite = load_suite(suite_name)
    if suite_name == "llm-prefill":
        suite = only_dtypes(suite, ["bf16"])
    rng = np.random.default_rng(seed)
    ours = {name for name in speeds if name.startswith("flashmoe")}
    baseline = "sdpa-flash" if "sdpa-flash" in speeds else next((name for name in speeds if name not in ours), "")
    records = []
    for case in suite.cases:
        cell = Cell(case, timing=timing, coverage=1.0, seconds=1.0)
        for name, speed in speeds.items():
            right = name != wrong
            cell.verified[name] = Verification(
                right, 0.001 if right else 0.7, 0.004, None, 1.0, "" if right else "max error 0.7"
            )
            if right:
                cell.timings[name] = Timing(_blocks(case, speed, blocks, rng), [12000, 12500, 13000], 1_000_000)
        cell.unsupported["flash-attn-3"] = "ImportError: not there"
        cell.readings.append(Reading(1980, 2619, 650.0, 55, ()))
        records.append(cell_record(cell, ours, baseline, CeilingRates(CEILINGS["matmul_tflops"], 2900.0)))
    if partial:
        records = records[: len(records) // 2]
    checks = [check for record in records for check in cell_checks(record, ours, baseline)]
    if partial:
        checks.append(Check("the rest", Verdict.SKIP, partial))
    data = {
        "schema": DATA_SCHEMA,
        "suite": {"name": suite.name, "title": suite.title, "cases": len(suite.cases)},
        "settings": {"device": device, "repeats": 3 * blocks, "block": 3},
        "partial": partial,
        "baseline": baseline,
        "contenders": [{"name": name, "title": name.upper(), "ours": name in ours} for name in speeds],
        "absent": {},
        "ceilings": CEILINGS,
        "cells": records,
        "aggregates": aggregate(records),
    }
    environment = {"gpu": {"name": "Invented GPU", "capability": "9.0"}, "packages": {"torch": "2.10.0"}}
    command = ("python", "-m", "flashmoe", "bench", "--suite", suite.name)
    return Report("bench", tuple(checks), data, environment, command, "2030-01-01T00:00:00+00:00", 100.0)


def _blocks(case: AttentionProblem, speed: float, blocks: int, rng: np.random.Generator) -> list[list[int]]:
    """Times in ns that rise to ``speed`` of 800 TFLOP/s with the sequence length."""
    size = getattr(case, "seq_k", None) or getattr(case, "tokens", None) or case.seq
    length = size / (size + 400.0)
    mean = case.flops / (800.0 * speed * length) / 1e3 + 1500.0
    return [[round(mean * value) for value in np.exp(rng.normal(0.0, 0.008, 3))] for _ in range(blocks)]
