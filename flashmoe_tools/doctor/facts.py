"""What the doctor knows about a machine, as plain data."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Python:
    version: tuple[int, int, int]
    implementation: str  # "cpython"
    machine: str  # "x86_64"
    system: str  # "Linux"
    glibc: str  # "2.36"; empty for another C library


@dataclass(frozen=True)
class Package:
    """An installed distribution; ``versions`` is empty if there is none and has several elements if there are several."""

    versions: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        return self.versions[0] if self.versions else ""


@dataclass(frozen=True)
class Gpu:
    name: str
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """libcuda.so.1: ``version`` is the CUDA version that it supports (12080 for 12.8), 0 if it is absent."""

    version: int = 0
    gpus: tuple[Gpu, ...] = ()
    error: str = ""  # CUDA's name for a failed cuInit or cuDeviceGet..., such as "CUDA_ERROR_NO_DEVICE"


@dataclass(frozen=True)
class Links:
    """Links between the GPUs of this machine, if there are at least two."""

    unreachable: tuple[tuple[int, int], ...] = ()  # (a, b): GPU a cannot access the memory of GPU b
    peers_problem: str = ""  # why the driver could not be queried
    topology: tuple[tuple[str, ...], ...] = ()  # [a][b]: "NV18", "PIX", "SYS", ...
    topology_problem: str = ""  # why nvidia-smi could not be queried


@dataclass(frozen=True)
class Compiler:
    command: str
    version: str = ""  # empty: not found, or no version printed


@dataclass(frozen=True)
class Lock:
    """The lock check of a checkout; ``name`` is empty if this Python is not in one of its environments."""

    checkout: bool
    name: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Extension:
    """The compiled library on disk; ``targets`` are those in its provenance."""

    found: bool
    shown: str = ""  # path relative to the package or checkout
    targets: tuple[str, ...] = ()
    error: str = ""
    damaged: bool = False  # a file of this name that is not an ELF file


@dataclass(frozen=True)
class Probe:
    """What the process that loads the extension reported."""

    ran: bool = False
    problem: str = ""  # why torch cannot be imported
    loaded: bool = False
    load_error: str = ""
    torch_version: str = ""
    torch_cuda: str = ""
    smoke: str = ""  # one line; empty if it did not get that far
    smoke_ok: bool = False
    smoke_raised: bool = False  # an error instead of numbers
    targets: tuple[str, ...] = ()
    seconds: float = 0.0
    timed_out: bool = False
    nccl: str = ""  # "2.27.5"; empty: torch has none


@dataclass(frozen=True)
class Facts:
    """All inputs of the verdicts."""

    flashmoe: str
    python: Python
    torch: Package
    torch_cuda: str  # "12.8"; empty for a build without CUDA, or if torch is absent
    numpy: Package
    driver: Driver
    compiler: Compiler
    lock: Lock
    extension: Extension
    probe: Probe
    variables: dict[str, str] = field(default_factory=dict)  # the ones that are set, of VARIABLES in collect
    nvcc: bool = False
    links: Links = field(default_factory=Links)
    shadows: tuple[str, ...] = ()  # what else provides the import name, in words
