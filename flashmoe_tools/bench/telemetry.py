"""Reads clocks, power, temperature and throttle reasons through NVML; never changes the GPU's settings."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

# nvml.h, nvmlClocksThrottleReason*: bit -> word. The idle and application-clock bits are not throttling.
THROTTLE_BITS: Mapping[int, str] = MappingProxyType(
    {
        0x4: "software power cap",
        0x8: "hardware slowdown",
        0x20: "software thermal slowdown",
        0x40: "hardware thermal slowdown",
        0x80: "hardware power brake",
    }
)


WATCH_SECONDS = 0.02


@dataclass(frozen=True)
class Reading:
    """MHz, watts, degrees Celsius, read right after a block of samples."""

    sm_clock: int
    memory_clock: int
    power: float
    temperature: int
    throttle: tuple[str, ...]


@dataclass(frozen=True)
class Load:
    """Mean SM clock (MHz) and power (watts) while calls ran back to back; None if NVML does not report it."""

    sm_clock: float | None = None
    power: float | None = None


class Watch:
    """Reads clock and power every ``WATCH_SECONDS`` in a background thread."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._done = threading.Event()
        self._readings: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.load = Load()

    def _read(self) -> None:
        while not self._done.wait(WATCH_SECONDS):
            reading, power = self._telemetry.read(), self._telemetry.power_now()
            if reading is not None and power is not None:
                self._readings.append((reading.sm_clock, power))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._readings:
            self.load = Load(*(sum(column) / len(self._readings) for column in zip(*self._readings, strict=True)))


class Telemetry:
    """Reads the GPU that torch uses. Without NVML ``reason`` says why and ``read`` gives None."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self._nvml: Any = None
        self._handle: Any = None

    @classmethod
    def of_gpu(cls, uuid: str, index: int) -> Telemetry:
        """``uuid`` finds the GPU whatever CUDA_VISIBLE_DEVICES is; ``index`` is used if it is unknown."""
        telemetry = cls()
        try:
            telemetry._nvml = import_module("pynvml")
            telemetry._nvml.nvmlInit()
            telemetry._handle = telemetry._find(uuid, index)
        except ImportError:
            telemetry.reason = "nvidia-ml-py is not installed"
        except Exception as error:  # NVML raises one class per error code, none of them worth stopping for
            telemetry.reason = f"NVML: {error}"
        return telemetry

    def _find(self, uuid: str, index: int) -> Any:
        for number in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(number)
            name = self._nvml.nvmlDeviceGetUUID(handle)
            text = name.decode() if isinstance(name, bytes) else str(name)
            if uuid and uuid in text:
                return handle
        return self._nvml.nvmlDeviceGetHandleByIndex(index)

    def read(self) -> Reading | None:
        if self._handle is None:
            return None
        nvml, handle = self._nvml, self._handle
        try:
            mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            return Reading(
                sm_clock=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                memory_clock=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
                power=nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
                temperature=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                throttle=throttle_words(mask),
            )
        except Exception as error:  # as above: a failed reading is missing, not fatal
            self.reason = f"NVML: {error}"
            return None

    def watch(self) -> Watch:
        """A context that records clock and power; its ``load`` has the means afterwards."""
        return Watch(self)

    def power_now(self) -> float | None:
        """Instantaneous watts, if NVML reports them: its usual reading is a mean over the past second."""
        if self._handle is None:
            return None
        try:
            (field,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [self._nvml.NVML_FI_DEV_POWER_INSTANT])
            return float(field.value.uiVal) / 1000.0
        except Exception as error:  # as above
            self.reason = f"NVML: {error}"
            return None

    def busy(self) -> float | None:
        """Share of the last second in which a kernel ran on the GPU; None if NVML does not report it."""
        if self._handle is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100.0
        except Exception as error:  # as above
            self.reason = f"NVML: {error}"
            return None

    def limits(self) -> dict[str, Any]:
        """Power limit in watts and the driver's version, if NVML reports them."""
        if self._handle is None:
            return {}
        try:
            driver = self._nvml.nvmlSystemGetDriverVersion()
            return {
                "power_limit": self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000.0,
                "driver": driver.decode() if isinstance(driver, bytes) else str(driver),
            }
        except Exception as error:  # as above
            self.reason = f"NVML: {error}"
            return {}


def cpu_busy(seconds: float = 0.3) -> float | None:
    """Share of the processors' time that other processes use, measured over a moment in which this process sleeps.

    Load averages are no alternative: after a build they stay high for minutes. None if /proc/stat does not say.
    """
    before = _processor_ticks()
    time.sleep(seconds)
    after = _processor_ticks()
    if before is None or after is None or after[1] <= before[1]:
        return None
    return round((after[0] - before[0]) / (after[1] - before[1]), 3)


def _processor_ticks() -> tuple[int, int] | None:
    """(busy, all) ticks of all processors since boot. proc(5): user nice system idle iowait irq softirq steal."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
        ticks = [int(word) for word in words[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
    except (OSError, ValueError, IndexError):
        return None


def throttle_words(mask: int) -> tuple[str, ...]:
    return tuple(word for bit, word in THROTTLE_BITS.items() if mask & bit)


def summarise(readings: Sequence[Reading]) -> dict[str, Any] | None:
    """Lowest and highest of each quantity over a cell, and every throttle reason seen with its share of readings."""
    if not readings:
        return None
    rows = [asdict(reading) for reading in readings]
    summary: dict[str, Any] = {
        name: [min(row[name] for row in rows), max(row[name] for row in rows)]
        for name in ("sm_clock", "memory_clock", "power", "temperature")
    }
    summary["throttle"] = _shares((reading.throttle for reading in readings), len(readings))
    summary["readings"] = len(readings)
    return summary


def _shares(reasons: Iterable[tuple[str, ...]], total: int) -> dict[str, float]:
    counts: dict[str, int] = {}
    for words in reasons:
        for word in words:
            counts[word] = counts.get(word, 0) + 1
    return {word: count / total for word, count in counts.items()}
