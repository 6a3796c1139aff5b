"""Ceilings of a machine with made-up times."""

from collections.abc import Callable

import pytest
import torch

from flashmoe_tools.bench import ceilings
from flashmoe_tools.bench.ceilings import Product, measure_ceilings, product_dtypes
from flashmoe_tools.bench.suites import load_suite, suite_names


def times(monkeypatch: pytest.MonkeyPatch, answer: dict[int, float]) -> list[Product]:
    """Each product takes the time that ``answer`` gives for its size; returns the requested products."""
    requested: list[Product] = []

    def product(device: str, one: Product) -> list[int]:
        requested.append(one)
        return [int(answer[one.size]), int(3 * answer[one.size])]

    monkeypatch.setattr(ceilings, "PRODUCT_SIZE", {"cpu": 128})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 1000})
    monkeypatch.setattr(ceilings, "_product", product)
    monkeypatch.setattr(ceilings, "_copy", lambda device: [400, 200])
    return requested


def test_the_fastest_product_and_the_fastest_copy_count(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = times(monkeypatch, {64: 1000.0, 128: 4000.0})
    found = measure_ceilings("cpu", ["f32", "f32"])
    assert [(one.size, one.transposed) for one in requested] == [(64, False), (64, True), (128, False), (128, True)]
    assert found.matmul_tflops == {"f32": 2 * 128**3 / 4000 / 1e3}
    assert found.matmul_of["f32"].startswith("f32 128 x 128")
    assert found.copy_gbps == 2 * 1000 / 200


def test_where_a_product_is_slow_no_larger_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = times(monkeypatch, {64: ceilings.SLOW + 1, 128: 1.0})
    measure_ceilings("cpu", ["f32"])
    assert len(requested) == 1
    requested = times(monkeypatch, {64: ceilings.SLOW, 128: 1.0})
    measure_ceilings("cpu", ["f32"])
    assert len(requested) == 4


def test_16_bits_on_a_cpu_may_be_computed_in_another_format(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = times(monkeypatch, {64: 1000.0, 128: 4000.0})
    assert set(measure_ceilings("cpu", ["bf16"]).matmul_tflops) == {"bf16"}
    assert {one.dtype for one in requested} == {"bf16", "f16", "f32"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", suite_names())
def test_the_products_of_every_suite_can_be_made(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes those that a GPU would be asked for, although only the CPU multiplies here."""
    made: list[torch.Tensor] = []

    def once(device: str, call: Callable[[], torch.Tensor]) -> list[int]:
        made.append(call())
        return [1]

    monkeypatch.setattr(ceilings, "PRODUCT_SIZE", {"cpu": 32})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 1024})
    monkeypatch.setattr(ceilings, "_times", once)
    monkeypatch.setattr(ceilings, "product_dtypes", lambda here, dtype: product_dtypes(device, dtype))
    dtypes = {case.dtype for case in load_suite(name).cases}
    found = measure_ceilings("cpu", dtypes)
    assert set(found.matmul_tflops) == dtypes
    assert len(made) >= 2 * len(dtypes) + 1
