"""Building blocks of contenders; those of an operation are in flashmoe_tools/operations/NAME/contenders.py."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flashmoe.errors import ArgumentError, FlashmoeError
from flashmoe_tools import operations
from flashmoe_tools.operations import DEFAULT_OPERATION

Call = Callable[[], Any]  # returns a result in the form that its problem's reference judges
Context = Callable[[], contextlib.AbstractContextManager[Any]]
KERNEL_VARIABLE = "FLASHMOE_KERNEL"


@dataclass(frozen=True)
class Prepared:
    """A contender bound to inputs: ``call`` gives the result; ``lse`` (ours only) gives attention's log-sum-exp to check.

    ``own``: the inputs of the problem that the contender computes, if that is not the case itself: a reference
    measurement such as our kernel without the window.
    """

    call: Call
    lse: Call | None = None
    own: Any = None


@dataclass(frozen=True)
class Contender:
    """``available`` gives "" or the reason why not; ``context`` selects the backend around a slot, outside the timing."""

    name: str
    title: str
    devices: tuple[str, ...]
    available: Callable[[str], str]
    prepare: Callable[[Any], Prepared]  # takes the inputs of its operation's problems
    context: Context = contextlib.nullcontext
    ours: bool = False


def always(_: str) -> str:
    """``available`` for everything that torch includes."""
    return ""


def forced(backend: str) -> Context:
    """Selects a backend with torch's own switch; a backend that refuses raises instead of falling back."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        attention = import_module("torch.nn.attention")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one warning per reason of a refusal; the error reports the outcome
            with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
                yield

    return context


def flashmoe_available(_: str) -> str:
    """``available`` for our own contenders."""
    try:
        import_module("flashmoe._extension").load()
    except (FlashmoeError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def family(family: str) -> Context:
    """Restricts our kernels to one family."""
    return setting(KERNEL_VARIABLE, family)


def setting(name: str, value: str) -> Context:
    """Sets an environment variable that our library reads in each call."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before

    return context


def installed(module: str) -> Callable[[str], str]:
    """``available`` for another library."""

    def available(_: str) -> str:
        try:
            import_module(module)
        except (
            Exception
        ) as error:  # what another library's import raises is unknown: a broken one must not stop a suite
            return f"{module} is not usable here: {type(error).__name__}: {error}"
        return ""

    return available


def default_registry(operation: str = DEFAULT_OPERATION) -> dict[str, Contender]:
    """Every known contender of ``operation`` by name, installed here or not."""
    known: tuple[Contender, ...] = import_module(f"{operations.__name__}.{operation}.contenders").contenders()
    return {contender.name: contender for contender in known}


def choose(
    registry: Mapping[str, Contender], names: Sequence[str], device: str, *, baseline_only: bool
) -> list[Contender]:
    """The named contenders that run on ``device``. An unknown name is an ArgumentError."""
    unknown = [name for name in names if name not in registry]
    if unknown:
        msg = f"no contender {unknown[0]!r}; known: {', '.join(sorted(registry))}"
        raise ArgumentError(msg)
    chosen = [registry[name] for name in dict.fromkeys(names) if device in registry[name].devices]
    return [one for one in chosen if not (baseline_only and one.ours)]


def package_versions() -> dict[str, str]:
    """Versions of the installed packages that take part in a measurement."""
    found = {}
    for name in (
        "torch",
        "numpy",
        "scipy",
        "triton",
        "flash-attn",
        "flash-attn-3",
        "nvidia-cudnn-cu12",
        "nvidia-cudnn-cu13",
    ):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
