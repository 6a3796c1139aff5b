"""What is read from NVML, with a fake library: the GPU that torch uses, its state, never its settings."""

# ruff: noqa: N802 - the names are NVML's

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from flashmoe_tools.bench.markdown import load_text
from flashmoe_tools.bench.record import cell_record
from flashmoe_tools.bench.runner import Cell, Timing
from flashmoe_tools.bench.telemetry import Load, Reading, Telemetry, cpu_busy, summarise, throttle_words
from flashmoe_tools.operations.attention.problem import AttentionProblem


class FakeNvml(ModuleType):
    """Two GPUs, without any function that would change a setting."""

    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, mask: int = 0, broken: bool = False) -> None:
        super().__init__("pynvml")
        self.mask = mask
        self.broken = broken

    def nvmlInit(self) -> None:
        if self.broken:
            raise RuntimeError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes | str:
        return [b"GPU-aaaa-1", "GPU-bbbb-2"][handle]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.mask

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1000 * (handle + 1) + kind

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 350_500

    NVML_FI_DEV_POWER_INSTANT = 186

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:
        assert fields == [186]
        return [SimpleNamespace(value=SimpleNamespace(uiVal=650_000))]

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 61

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"


def test_the_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(mask=0x4 | 0x1 | 0x40))
    telemetry = Telemetry.of_gpu("bbbb-2", index=0)
    assert telemetry.read() == Reading(2001, 2002, 350.5, 61, ("software power cap", "hardware thermal slowdown"))
    assert telemetry.limits() == {"power_limit": 700.0, "driver": "570.1"}
    assert telemetry.reason == ""
    assert Telemetry.of_gpu("unknown", index=1).read() == telemetry.read()


@pytest.mark.parametrize(
    ("module", "words"),
    [(None, "not installed"), (FakeNvml(broken=True), "NVML: Driver Not Loaded"), (ModuleType("pynvml"), "NVML")],
)
def test_without_nvml_it_says_why_and_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    telemetry = Telemetry.of_gpu("", 0)
    assert words in telemetry.reason
    assert telemetry.read() is None
    assert telemetry.limits() == {}


def test_a_reading_that_fails_is_missing_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    telemetry = Telemetry.of_gpu("aaaa-1", 0)

    def refuse(_: int) -> int:
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(fake, "nvmlDeviceGetPowerUsage", refuse)
    assert telemetry.read() is None
    assert telemetry.reason == "NVML: Not Supported"


def test_the_processors_are_watched_while_this_process_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(100, 1000), (130, 1100)])
    monkeypatch.setattr("flashmoe_tools.bench.telemetry._processor_ticks", lambda: next(readings))
    assert cpu_busy(0.0) == 0.3
    monkeypatch.setattr("flashmoe_tools.bench.telemetry._processor_ticks", lambda: None)
    assert cpu_busy(0.0) is None
    monkeypatch.undo()
    here = cpu_busy(0.05)
    assert here is None or 0.0 <= here <= 1.0


def test_a_cell_keeps_the_extremes_and_the_share_of_throttled_readings() -> None:
    rows = [Reading(1980, 2619, 300.0, 50, ()), Reading(1755, 2619, 700.0, 62, ("software power cap",))]
    found = summarise(rows)
    assert found is not None
    assert found["sm_clock"] == [1755, 1980]
    assert found["power"] == [300.0, 700.0]
    assert found["throttle"] == {"software power cap": 0.5}
    assert found["readings"] == 2
    assert summarise([]) is None
    assert throttle_words(0x1 | 0x2) == ()  # idle and application clocks are not throttling


def test_clock_and_power_are_followed_while_calls_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    with Telemetry.of_gpu("GPU-bbbb", 0).watch() as watch:
        time.sleep(0.1)
    assert watch.load.sm_clock == 2001
    assert watch.load.power == 650
    with Telemetry("no GPU").watch() as watch:
        time.sleep(0.03)
    assert watch.load == Load()
    for missing, other in (("read", "power_now"), ("power_now", "read")):
        telemetry, requested = Telemetry.of_gpu("GPU-bbbb", 0), list[str]()
        monkeypatch.setattr(telemetry, missing, lambda: None)
        own = getattr(telemetry, other)
        monkeypatch.setattr(telemetry, other, lambda own=own, requested=requested: requested.append("") or own())
        with telemetry.watch() as watch:
            time.sleep(0.2)
        assert watch.load == Load()
        assert len(requested) > 1  # it continued
    cell = Cell(AttentionProblem.smallest(), timings={"flashmoe": Timing([[1000]], load=[Load(1500.0, 600.0)])})
    record = cell_record(cell, {"flashmoe"}, "", None)
    assert load_text(record, "flashmoe") == " 1500 MHz 600 W"
    assert load_text(record, "another") == ""
