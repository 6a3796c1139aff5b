"""thresholds.toml as frozen dataclasses."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashmoe_tools.toml import tomllib


@dataclass(frozen=True)
class VerdictThresholds:
    confidence: float
    min_blocks: int
    same_margin: float
    large_gain: float


@dataclass(frozen=True)
class StatisticsSettings:
    resamples: int
    trim: float
    seed: int


@dataclass(frozen=True)
class SpeedThresholds:
    stop: float
    caution: float
    next_bottleneck: float
    memory_bandwidth: float
    launch_bound_us: float
    peak_memory: float
    peak_memory_spare: int


@dataclass(frozen=True)
class ErrorThresholds:
    max_difference_to_sdpa: float


@dataclass(frozen=True)
class MachineThresholds:
    cpu_busy: float
    gpu_busy: float


@dataclass(frozen=True)
class CompareThresholds:
    normalised_margin: float
    absolute_margin: float
    same_margin: float
    busy_margin: float


@dataclass(frozen=True)
class RatchetThresholds:
    fail_below: float
    propose_above: float


@dataclass(frozen=True)
class CallThresholds:
    max_share: float


@dataclass(frozen=True)
class Thresholds:
    verdict: VerdictThresholds
    statistics: StatisticsSettings
    speed: SpeedThresholds
    error: ErrorThresholds
    machine: MachineThresholds
    compare: CompareThresholds
    ratchet: RatchetThresholds
    call: CallThresholds


@lru_cache(maxsize=1)
def load_thresholds() -> Thresholds:
    with (Path(__file__).resolve().parent / "thresholds.toml").open("rb") as stream:
        table = tomllib.load(stream)
    return Thresholds(
        verdict=VerdictThresholds(**table["verdict"]),
        statistics=StatisticsSettings(**table["statistics"]),
        speed=SpeedThresholds(**table["speed"]),
        error=ErrorThresholds(**table["error"]),
        machine=MachineThresholds(**table["machine"]),
        compare=CompareThresholds(**table["compare"]),
        ratchet=RatchetThresholds(**table["ratchet"]),
        call=CallThresholds(**table["call"]),
    )
