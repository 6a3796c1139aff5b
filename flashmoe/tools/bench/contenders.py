"""What can be timed: our operator (each kernel family too), torch's backends forced by name, other libraries."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from flashmoe.errors import ArgumentError, FlashmoeError
from flashmoe.tools.bench.inputs import Inputs

Call = Callable[[], torch.Tensor]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
KERNEL_VARIABLE = "FLASHMOE_KERNEL"
FAMILIES = ("sm75", "sm80", "sm90")


@dataclass(frozen=True)
class Prepared:
    """A contender bound to inputs: ``call`` gives [B, Hq, Sq, D]; ``lse`` (ours alone) the log-sum-exp [B, Hq, Sq]."""

    call: Call
    lse: Call | None = None


@dataclass(frozen=True)
class Contender:
    """``available`` gives "" or the reason why not; ``context`` forces the backend around a slot, off the clock."""

    name: str
    title: str
    devices: tuple[str, ...]
    available: Callable[[str], str]
    prepare: Callable[[Inputs], Prepared]
    context: Context = contextlib.nullcontext
    ours: bool = False


def _always(_: str) -> str:
    return ""


def _sdpa(inputs: Inputs) -> Prepared:
    case = inputs.case
    grouped = case.heads_q != case.heads_kv
    is_causal, mask = case.causal, None
    if (
        case.causal and case.seq_q != case.seq_k
    ):  # is_causal means top-left; this bias is what torch has for bottom-right
        is_causal, mask = False, import_module("torch.nn.attention.bias").causal_lower_right(case.seq_q, case.seq_k)

    def call() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, mask, is_causal=is_causal, scale=inputs.scale, enable_gqa=grouped
        )

    return Prepared(call)


def _forced(backend: str) -> Context:
    """torch's own switch, by the backend's name; a backend that refuses raises instead of falling back."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        attention = import_module("torch.nn.attention")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one warning for each reason of a refusal; the error carries the outcome
            with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
                yield

    return context


def _flashmoe_available(_: str) -> str:
    try:
        import_module("flashmoe._extension").load()
    except (FlashmoeError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _flashmoe(inputs: Inputs) -> Prepared:
    import flashmoe

    case = inputs.case
    attention = flashmoe.attention

    def call() -> torch.Tensor:
        result: torch.Tensor = attention(inputs.q, inputs.k, inputs.v, causal=case.causal, scale=inputs.scale)
        return result

    def lse() -> torch.Tensor:
        result: torch.Tensor = attention(
            inputs.q, inputs.k, inputs.v, causal=case.causal, scale=inputs.scale, return_lse=True
        )[1]
        return result

    return Prepared(call, lse)


def _flashmoe_sdpa(inputs: Inputs) -> Prepared:
    """Our function with torch's signature; its causal mask is top-left, so square problems alone can be compared."""
    import flashmoe

    case = inputs.case
    if case.causal and case.seq_q != case.seq_k:
        msg = f"{case.key}: is_causal is aligned top-left, this problem bottom-right"
        raise ArgumentError(msg)
    attention = flashmoe.scaled_dot_product_attention
    grouped = case.heads_q != case.heads_kv

    def call() -> torch.Tensor:
        return attention(
            inputs.q, inputs.k, inputs.v, None, is_causal=case.causal, scale=inputs.scale, enable_gqa=grouped
        )

    return Prepared(call)


def _family(family: str) -> Context:
    @contextlib.contextmanager
    def context() -> Iterator[None]:
        before = os.environ.get(KERNEL_VARIABLE)
        os.environ[KERNEL_VARIABLE] = family
        try:
            yield
        finally:
            if before is None:
                del os.environ[KERNEL_VARIABLE]
            else:
                os.environ[KERNEL_VARIABLE] = before

    return context


def _installed(module: str) -> Callable[[str], str]:
    def available(_: str) -> str:
        try:
            import_module(module)
        except (ImportError, OSError) as error:
            return f"{module} is not usable here: {error}"
        return ""

    return available


def _flash_attn(module: str) -> Callable[[Inputs], Prepared]:
    """flash-attn's functions take [B, S, H, D]; the transposed views cost no copy."""

    def prepare(inputs: Inputs) -> Prepared:
        function = import_module(module).flash_attn_func
        q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))

        def call() -> torch.Tensor:
            result = function(q, k, v, softmax_scale=inputs.scale, causal=inputs.case.causal)
            out: torch.Tensor = result[0] if isinstance(result, tuple) else result
            return out.transpose(1, 2)

        return Prepared(call)

    return prepare


def _sdpa_backend(name: str, backend: str, title: str, devices: tuple[str, ...] = ("cuda",)) -> Contender:
    return Contender(name, title, devices, _always, _sdpa, _forced(backend))


def default_registry() -> dict[str, Contender]:
    """Every contender that is known, installed here or not, by name."""
    known = [
        Contender("flashmoe", "flashmoe", ("cpu", "cuda"), _flashmoe_available, _flashmoe, ours=True),
        *(
            Contender(
                f"flashmoe-{one}", f"flashmoe {one}", ("cuda",), _flashmoe_available, _flashmoe, _family(one), ours=True
            )
            for one in FAMILIES
        ),
        Contender("flashmoe-sdpa", "flashmoe's SDPA", ("cpu", "cuda"), _flashmoe_available, _flashmoe_sdpa, ours=True),
        Contender("sdpa", "SDPA, its own choice", ("cpu", "cuda"), _always, _sdpa),
        _sdpa_backend("sdpa-flash", "FLASH_ATTENTION", "SDPA FLASH"),
        _sdpa_backend("sdpa-cudnn", "CUDNN_ATTENTION", "SDPA CUDNN"),
        _sdpa_backend("sdpa-efficient", "EFFICIENT_ATTENTION", "SDPA EFFICIENT"),
        _sdpa_backend("sdpa-math", "MATH", "SDPA MATH", ("cpu", "cuda")),
        Contender("sdpa-cpu", "SDPA CPU", ("cpu",), _always, _sdpa),
        Contender("flash-attn", "flash-attn", ("cuda",), _installed("flash_attn"), _flash_attn("flash_attn")),
        Contender(
            "flash-attn-3", "FA3", ("cuda",), _installed("flash_attn_interface"), _flash_attn("flash_attn_interface")
        ),
    ]
    return {contender.name: contender for contender in known}


def choose(
    registry: Mapping[str, Contender], names: Sequence[str], device: str, *, baseline_only: bool
) -> list[Contender]:
    """The named contenders that exist for ``device``. An unknown name is an ArgumentError."""
    unknown = [name for name in names if name not in registry]
    if unknown:
        msg = f"no contender {unknown[0]!r}; known: {', '.join(sorted(registry))}"
        raise ArgumentError(msg)
    chosen = [registry[name] for name in dict.fromkeys(names) if device in registry[name].devices]
    return [one for one in chosen if not (baseline_only and one.ours)]


def package_versions() -> dict[str, str]:
    """Versions of what takes part in a measurement, where installed."""
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
