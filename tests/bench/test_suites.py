"""Suite files: what they state, and the error for each mistake in one."""

import re
from pathlib import Path
from typing import Any

import pytest

from flashmoe_tools.bench.contenders import default_registry
from flashmoe_tools.bench.presets import apply_preset, find_preset, load_presets
from flashmoe_tools.bench.suites import load_suite, parse_suite, suite_names
from flashmoe_tools.operations.fields import SuiteError

GOOD: dict[str, Any] = {
    "schema": 1,
    "name": "mine",
    "cases": [{"dtype": "f16", "head_dim": 64, "batch": 1, "heads": 8, "seq": [128, 256]}],
}


def with_case(**changes: Any) -> dict[str, Any]:
    return {**GOOD, "cases": [{**GOOD["cases"][0], **changes}]}


def without(name: str) -> dict[str, Any]:
    return {**GOOD, "cases": [{key: value for key, value in GOOD["cases"][0].items() if key != name}]}


def test_the_page_lists_the_suites() -> None:
    """Suites are discovered, so one that has disappeared is noticed here."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    listed = text.partition("Suites are TOML files")[2].partition("`operation`")[0].partition(":")[2]
    assert sorted(re.findall(r"`([\w-]+)`", listed)) == sorted({*suite_names(), "build-cost"})


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_of_ours_reads(name: str) -> None:
    suite = load_suite(name)
    assert suite.name == name
    assert suite.cases or suite.workloads
    assert {case.key for case in suite.quick().cases} <= {case.key for case in (*suite.cases, *suite.quick_only)}


def test_prefill_is_the_published_grid() -> None:
    cases = load_suite("llm-prefill").cases
    assert len(cases) == 72
    assert {case.dtype for case in cases} == {"bf16", "f16"}
    assert {case.head_dim for case in cases} == {64, 128, 256}
    assert {case.batch * case.seq_q for case in cases} == {16384}
    assert {case.heads_q * case.head_dim for case in cases} == {2048}
    assert sum(case.causal for case in cases) == 36


def test_case_costs() -> None:
    full = next(case for case in load_suite("llm-prefill").cases if case.seq_q == 512 and not case.causal)
    assert full.flops == 4 * full.batch * full.heads_q * 512 * 512 * full.head_dim
    causal = next(case for case in load_suite("llm-prefill").cases if case.seq_q == 512 and case.causal)
    assert causal.flops * 2 == full.flops
    decode = load_suite("decode").cases[0]
    key_bytes = 2 * decode.batch * decode.heads_kv * decode.seq_k * decode.head_dim * 2
    assert key_bytes < decode.bytes_moved < 1.01 * key_bytes


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({**GOOD, "schema": 2}, ("schema is 2",)),
        ({**GOOD, "operation": "mixture"}, ("operation is 'mixture'", "one of attention")),
        ({**GOOD, "repeat": 3}, ("repeat is 3", "repeats")),
        *(({**GOOD, "cases": wrong}, ("at least one table of cases",)) for wrong in ([], GOOD["cases"][0], "f16")),
        ({**GOOD, "timing": "stopwatch"}, ("'stopwatch'", "events, graph, sustained, wall")),
        ({**GOOD, "devices": ["tpu"]}, ("'tpu'", "cpu, cuda")),
        ({**GOOD, "repeats": 0}, ("repeats is 0", "at least 1")),
        ({**GOOD, "repeats": True}, ("repeats is True",)),
        ({**GOOD, "name": ""}, ("name is ''",)),
        (with_case(dtype="fp8"), ("cases[1]", "'fp8'", "f16, bf16, f32")),
        (with_case(head_dim=640), ("head_dim is 640", "at most 512")),
        (with_case(heads_kv=3), ("heads_kv is 3", "divisor of 8")),
        (with_case(heds=3), ("heds is 3", "heads")),
        (with_case(causal="yes"), ("causal is 'yes'", "true or false")),
        (with_case(tokens=16384), ("exactly one of batch and tokens",)),
        (with_case(seq_q=1), ("seq, or seq_q and seq_k",)),
        (without("seq"), ("seq",)),
        (without("heads"), ("exactly one of heads and hidden",)),
        (with_case(seq=[100, "200"]), ("'200'", "whole number")),
    ],
)
def test_mistakes_are_named(table: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SuiteError) as caught:
        parse_suite(table, "mine.toml")
    assert "mine.toml" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_causal_with_fewer_keys_than_rows_is_refused() -> None:
    row = {"dtype": "f16", "head_dim": 64, "batch": 1, "heads": 8, "seq_q": 128, "seq_k": 64, "causal": True}
    with pytest.raises(SuiteError, match="bottom-right"):
        parse_suite({**GOOD, "cases": [row]}, "mine.toml")


def test_operations_of_a_bottom_right_mask_are_what_the_rows_see() -> None:
    row = {"dtype": "f16", "head_dim": 64, "batch": 2, "heads": 3, "seq_q": 4, "seq_k": 10, "causal": True}
    (case,) = parse_suite({**GOOD, "cases": [row]}, "mine.toml").cases
    assert case.flops == 4 * 2 * 3 * 64 * (7 + 8 + 9 + 10)


def test_a_product_that_explodes_is_refused() -> None:
    with pytest.raises(SuiteError, match="at most 4096"):
        parse_suite(with_case(seq=list(range(1, 6000))), "mine.toml")


def test_own_file_and_unknown_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'schema = 1\nname = "mine"\n[[cases]]\ndtype = "f32"\nhead_dim = 40\nbatch = 2\nheads = 3\nseq = 7\n'
    )
    assert load_suite(str(path)).cases[0].key == "f32-d40-full-b2-h3-s7"
    with pytest.raises(SuiteError, match=r"known suites are call-cost, call-cost-cpu, chunked-prefill, chunks"):
        load_suite("nothing")
    path.write_text("schema = ")
    with pytest.raises(SuiteError, match=r"mine\.toml is not TOML"):
        load_suite(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SuiteError, match=r"mine\.toml"):
        load_suite(str(path))


def test_a_preset_keeps_what_is_quick() -> None:
    suite = load_suite("llm-prefill")
    preset = find_preset("H100", "")
    assert preset is not None
    marked = {case.fit(preset.dtypes, preset.max_tokens).key for case in suite.cases if case.key in suite.quick_keys}
    fitted = apply_preset(suite, preset)
    assert fitted.quick_keys == marked < {case.key for case in fitted.cases}


def test_presets_fit_a_suite_to_a_gpu() -> None:
    assert {preset.name for preset in load_presets()} == {"T4", "L4", "A100", "H100"}
    assert find_preset("auto", "NVIDIA H100 80GB HBM3").name == "H100"  # type: ignore[union-attr]
    assert find_preset("auto", "NVIDIA L40S") is None  # not an L4
    assert find_preset("t4", "anything").name == "T4"  # type: ignore[union-attr]
    with pytest.raises(SuiteError, match="known: auto, T4"):
        find_preset("V100", "")
    small = apply_preset(load_suite("llm-prefill"), find_preset("T4", ""))
    assert {case.dtype for case in small.cases} == {"f16"}
    assert max(case.batch * case.seq_q for case in small.cases if case.batch > 1) <= 4096
    assert "sdpa-flash" not in small.contenders
    assert small.baseline == "sdpa-efficient"
    assert small.baseline in small.contenders


@pytest.mark.parametrize("preset", [preset.name for preset in load_presets()])
@pytest.mark.parametrize("name", suite_names())
def test_a_preset_adds_no_contender_that_the_operation_lacks(name: str, preset: str) -> None:
    suite = load_suite(name)
    fitted = apply_preset(suite, find_preset(preset, ""))
    if suite.kind == "operation":
        assert {*fitted.contenders, fitted.baseline} <= set(default_registry(suite.operation))
