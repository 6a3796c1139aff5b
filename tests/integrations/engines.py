"""vLLM for tests that run without it: small fakes with the signatures of the recorded contract.

With ``FLASHMOE_ENGINE_SOURCES`` (build/engines, where ``./nox -s engines`` stores sources), vLLM's own backend.py, registry.py,
selector.py and prefill/base.py replace the fakes; their other imports are mocks.
"""

import ast
import enum
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from flashmoe.moe.api import fused_moe
from flashmoe.moe.packed import is_packed, unpack_mxfp4

SOURCES_VARIABLE = "FLASHMOE_ENGINE_SOURCES"
ATTENTION = "vllm.v1.attention"
LATENT = "vllm.model_executor.layers.attention.mla_attention"
PROMPTS = f"{ATTENTION}.backends.mla.prefill.base"
QUANT_KEYS = ("kFp8Dynamic128Sym", "kFp8Static128BlockSym", "kMxfp4Static")


class Capability(NamedTuple):
    major: int
    minor: int


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__path__ = []
    made.__dict__.update(members)
    return made


class Mocked(ModuleType):
    """A module in which every name exists: a type if it is capitalised, for annotations, else a mock."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Any if name[0].isupper() else mock.MagicMock(name=name)


# vLLM: imports of flashmoe.integrations.vllm


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class CGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    NEVER = 0


@dataclass(frozen=True)
class MultipleOf:
    base: int


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True


class Backend:
    """The class methods of vLLM's base class that flashmoe's tests call."""

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(
        cls: Any, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, **given: Any
    ) -> list[str]:
        asked = {
            "head_size not supported": not cls.supports_head_size(head_size),
            "dtype not supported": dtype not in cls.supported_dtypes,
            "kv_cache_dtype not supported": kv_cache_dtype not in (None, *cls.supported_kv_cache_dtypes),
            "MLA not supported": given.get("use_mla", False) and not cls.is_mla(),
            "sparse not supported": given.get("use_sparse", False),
            "sinks not supported": given.get("has_sink", False) and not cls.supports_sink(),
            "KV connector not supported": given.get("use_kv_connector", False) and not cls.supports_kv_connector(),
            "compute capability not supported": not cls.supports_compute_capability(given["device_capability"]),
            "batch invariance not supported": given.get("use_batch_invariant", False) and not cls.supports_batch_invariance(),
        }  # fmt: skip
        return [reason for reason, is_so in asked.items() if is_so]


class Builder:
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device


class Impl:
    """The rest of the base class is not used."""


class LatentBackend(Backend):
    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_head_size(cls: Any, head_size: int) -> bool:
        return head_size in cls.get_supported_head_sizes()

    @classmethod
    def supports_sink(cls) -> bool:
        return False


class LatentImpl:
    def __init__(self, num_heads: int, head_size: int, scale: float, *arguments: Any, **latent: Any) -> None:
        self.num_heads, self.head_size, self.scale, self.latent = num_heads, head_size, float(scale), latent


PROMPT_SIZES = {"num_heads": 4, "scale": 0.1, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip


class PromptBackend:
    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        self._prefill_metadata = prefill_metadata


class LatentBuilder(Builder):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._prefill_backend = arguments[2].chosen  # vLLM gets it from the layer


class QueryLenSupport(enum.Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"


class SelectorConfig(NamedTuple):
    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str | None
    block_size: int | None
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_per_head_quant_scales: bool = False
    attn_type: str = AttentionType.DECODER
    use_batch_invariant: bool = False
    use_kv_connector: bool = False


class Backends(enum.Enum):
    FLASH_ATTN = "vllm.own.Backend"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in OVERRIDES

    def get_path(self) -> str:
        return str(OVERRIDES.get(self, self.value))


OVERRIDES: dict[Any, str] = {}


def choose(backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> Any:
    """Like vLLM's: the class that the platform chooses, by its path."""
    path = sys.modules["vllm.platforms"].current_platform.get_attn_backend_cls(
        backend, attn_selector_config=attn_selector_config, num_heads=num_heads
    )
    return path


class Platform:
    """Chooses FLASH_ATTN by default; rejects a requested backend with reasons against it, as vLLM does."""

    capability: Capability | None = Capability(9, 0)
    device_name = "stand-in"

    def get_device_capability(self) -> Capability | None:
        return self.capability

    def is_cpu(self) -> bool:
        return self.capability is None

    def get_attn_backend_cls(self, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        if selected_backend is None:
            return f"{__name__}.VllmOwn"
        module_name, _, name = selected_backend.get_path().rpartition(".")
        chosen = getattr(importlib.import_module(module_name), name)
        if reasons := chosen.validate_configuration(
            device_capability=self.capability, **attn_selector_config._asdict()
        ):
            msg = f"Selected backend {selected_backend} is not valid for this configuration. Reason: {reasons}"
            raise ValueError(msg)
        return str(selected_backend.get_path())

    def is_cuda(self) -> bool:
        return self.capability is not None

    def has_device_capability(self, capability: tuple[int, int]) -> bool:
        return self.capability is not None and self.capability >= capability


class VllmOwn:
    @classmethod
    def get_required_kv_cache_layout(cls) -> None:
        return None


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, k_scale: Tensor, v_scale: Tensor
) -> None:  # fmt: skip
    """Does what vLLM's operator does, token by token."""
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        for new, paged, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            token = new[row]
            if kv_cache_dtype.startswith("fp8"):
                token = (
                    (token.float() / scale.reshape(-1, 1)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
                )
            paged[slot // paged.shape[1], slot % paged.shape[1]] = token


# Experts


class MoEActivation(enum.Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"


class ActivationFormat(enum.Enum):
    Standard = "standard"


class ExpertsModular:
    post_gemm2_hook: Any = None

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config
        self.w1_bias, self.w2_bias = quant_config.w1_bias, quant_config.w2_bias

    @staticmethod
    def is_supported_config(
        cls: Any,  # noqa: PLW0211 (as vLLM calls it)
        moe_config: Any,
        weight_key: Any,
        activation_key: Any,
        activation_format: Any,
    ) -> tuple[bool, str | None]:
        if not cls._supports_current_device():
            return False, "kernel does not support current device"
        if not cls._supports_quant_scheme(weight_key, activation_key):
            return False, f"kernel does not support quantization scheme {weight_key}x{activation_key}"
        if not cls._supports_activation(moe_config.activation):
            return False, f"kernel does not support {moe_config.activation} activation"
        return activation_format == cls.activation_format(), None


REGISTERED: dict[str, type] = {}


class ExpertsMethod:
    def __init__(self, moe: Any) -> None:
        self.moe, self.unquantized_backend, self.experts_cls = moe, "vllm's choice", None

    @classmethod
    def register_oot(cls, method: type) -> type:
        assert cls.__name__ not in REGISTERED, "registered twice"
        REGISTERED[cls.__name__] = method
        return method


@dataclass
class MoEConfig:
    activation: Any = MoEActivation.SILU
    num_experts: int = 8
    experts_per_token: int = 2
    hidden_dim: int = 32
    intermediate_size_per_partition: int = 16
    in_dtype: torch.dtype = torch.bfloat16
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    has_bias: bool = False
    moe_backend: str = "auto"


@dataclass
class QuantConfig:
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    block_shape: list[int] | None = None


def packed_fused_moe(x: Tensor, w13: Tensor, w2: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """fused_moe for packed weights on a device without kernels for them; other weights are an error."""
    assert is_packed(w13)
    assert is_packed(w2)
    assert options.pop("w13_scale", None) is None
    assert options.pop("w2_scale", None) is None
    (w13, s13), (w2, s2) = unpack_mxfp4(w13, gated=options["layout"]), unpack_mxfp4(w2)
    return fused_moe(x, w13, w2, *arguments, w13_scale=s13, w2_scale=s2, **options)


def takes_packed(device: torch.device, *sizes: int) -> bool:
    """``can_pack`` on a machine where every device has the kernels."""
    return all(size % 64 == 0 for size in sizes)


def select_fp8(
    config: Any, weight_key: Any, activation_key: Any, allow_vllm_cutlass: bool = False
) -> tuple[str, str | None]:
    return "vllm's fp8", "its experts"


def select_mxfp4(config: Any, activation_key: Any = None) -> tuple[str, str | None]:
    return "vllm's mxfp4", "its experts"


def convert_mxfp4(
    mxfp4_backend: str, layer: Any, w13_weight: Tensor, w2_weight: Tensor, w13_weight_scale: Tensor, w2_weight_scale: Tensor,
    w13_bias: Tensor | None = None, w2_bias: Tensor | None = None, _cache_permute_indices: Any = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Like vLLM's for the backend XPU: converts nothing."""
    return w13_weight, w2_weight, w13_weight_scale, w2_weight_scale, w13_bias, w2_bias


def vllm_stand_ins() -> dict[str, ModuleType]:
    OVERRIDES.clear()
    REGISTERED.clear()
    layers, quantisation = "vllm.model_executor.layers.fused_moe", "vllm.model_executor.layers.quantization"
    envs = module("vllm.envs", VLLM_BATCH_INVARIANT=False)
    names = {
        "vllm": module("vllm", envs=envs),
        "vllm.envs": envs,
        "vllm.v1": module("vllm.v1"),
        "vllm._custom_ops": module("vllm._custom_ops", reshape_and_cache_flash=reshape_and_cache_flash),
        "vllm.platforms": module("vllm.platforms", current_platform=Platform()),
        f"{ATTENTION}.backend": module(
            f"{ATTENTION}.backend", AttentionBackend=Backend, AttentionImpl=Impl, AttentionMetadata=object, AttentionMetadataBuilder=Builder,
            AttentionCGSupport=CGSupport, AttentionType=AttentionType, MultipleOf=MultipleOf, CommonAttentionMetadata=CommonAttentionMetadata,
        ),
        f"{ATTENTION}.backends": module(f"{ATTENTION}.backends"),
        f"{ATTENTION}.backends.registry": module(
            f"{ATTENTION}.backends.registry", AttentionBackendEnum=Backends, register_backend=OVERRIDES.__setitem__
        ),
        f"{ATTENTION}.selector": module(f"{ATTENTION}.selector", _cached_get_attn_backend=choose, AttentionSelectorConfig=SelectorConfig),
        "vllm.model_executor.custom_op": module("vllm.model_executor.custom_op", op_registry_oot=REGISTERED),
        f"{layers}.activation": module(f"{layers}.activation", MoEActivation=MoEActivation),
        f"{layers}.modular_kernel": module(
            f"{layers}.modular_kernel", FusedMoEActivationFormat=ActivationFormat, FusedMoEExpertsModular=ExpertsModular
        ),
        f"{layers}.oracle.unquantized": module(f"{layers}.oracle.unquantized", UnquantizedMoeBackend=SimpleNamespace(TRITON="triton")),
        f"{layers}.oracle.fp8": module(f"{layers}.oracle.fp8", Fp8MoeBackend=SimpleNamespace(TRITON="triton")),
        f"{layers}.oracle.mxfp4": module(f"{layers}.oracle.mxfp4", Mxfp4MoeBackend=SimpleNamespace(XPU="xpu")),
        f"{quantisation}.fp8": module(f"{quantisation}.fp8", select_fp8_moe_backend=select_fp8),
        f"{quantisation}.mxfp4": module(
            f"{quantisation}.mxfp4", select_mxfp4_moe_backend=select_mxfp4, convert_gpt_oss_weight_to_mxfp4_moe_kernel_format=convert_mxfp4
        ),
        f"{quantisation}.utils.quant_utils": module(f"{quantisation}.utils.quant_utils", **{key: key for key in QUANT_KEYS}),
        LATENT: module(
            LATENT, MLACommonBackend=LatentBackend, MLACommonImpl=LatentImpl, MLACommonMetadataBuilder=LatentBuilder, QueryLenSupport=QueryLenSupport
        ),
        PROMPTS: module(PROMPTS, MLAPrefillBackend=PromptBackend),
        f"{layers}.topk_weight_and_reduce": module(f"{layers}.topk_weight_and_reduce", TopKWeightAndReduceNoOP=object),
        f"{layers}.unquantized_fused_moe_method": module(
            f"{layers}.unquantized_fused_moe_method", UnquantizedFusedMoEMethod=ExpertsMethod
        ),
    }  # fmt: skip
    for folder in (
        ATTENTION, "vllm.model_executor", "vllm.model_executor.layers", layers, f"{layers}.oracle", quantisation, f"{quantisation}.utils",
        LATENT.rpartition(".")[0], PROMPTS.rpartition(".")[0], f"{ATTENTION}.backends.mla",
    ):  # fmt: skip
        names.setdefault(folder, module(folder))
    link(names)
    return names


def link(modules: dict[str, ModuleType]) -> None:
    """Sets each module as an attribute of its package, for ``from package import module``."""
    for name, made in modules.items():
        parent, _, last = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], last, made)


@cache
def engine_sources() -> dict[str, Path]:
    """{"vllm-0.33.0": folder} for the sources given to this run."""
    folder = os.environ.get(SOURCES_VARIABLE)
    return {} if not folder else {path.name: path for path in sorted(Path(folder).glob("vllm-*"))}


def use_own_sources(modules: dict[str, ModuleType], folder: Path) -> None:
    """Replaces the fakes by vLLM's own backend.py, registry.py, selector.py and prefill/base.py; called while ``modules`` are in sys.modules."""
    needed = {
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.distributed.parallel_state": {"get_dcp_world_size_and_rank": lambda _=False: (1, 0), "get_pcp_group": no_group, "get_dcp_group": no_group},
        "vllm.utils.import_utils": {"resolve_obj_by_qualname": resolve},
    }  # fmt: skip
    for name in (
        "vllm.logger", "vllm.utils", "vllm.utils.import_utils", "vllm.config", "vllm.config.cache", "vllm.distributed", "vllm.distributed.parallel_state",
        "vllm.v1.kv_cache_interface", "vllm.model_executor.layers.quantization.utils.quant_utils", "vllm.v1.attention.backends.utils",
    ):  # fmt: skip
        made = Mocked(name)
        made.__dict__.update(needed.get(name, {}))
        sys.modules[name] = modules[name] = made
    for name in (f"{ATTENTION}.backend", f"{ATTENTION}.backends.registry", f"{ATTENTION}.selector", PROMPTS):
        path = folder / f"{name.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
        parent, _, last = name.rpartition(".")
        setattr(modules[parent], last, modules[name])


def own_class(folder: Path, module_name: str, name: str) -> Any:
    """A dataclass of vLLM's, compiled separately from its source, because its module's imports are missing."""
    tree = ast.parse((folder / f"{module_name.replace('.', '/')}.py").read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    made: dict[str, Any] = {"dataclass": dataclass, "torch": torch, "__name__": __name__}
    exec(compile(tree, name, "exec"), made)  # annotations stay strings, as in this file
    return made[name]


def no_group() -> None:
    raise AssertionError


def resolve(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module_name), name)


@contextmanager
def installed(modules: dict[str, ModuleType], package: str) -> Iterator[None]:
    """Makes ``modules`` importable, and imports our ``package`` anew."""
    before = {name: sys.modules[name] for name in list(sys.modules) if name.startswith(package)}
    for name in before:
        del sys.modules[name]
    with mock.patch.dict(sys.modules, modules):
        yield
    sys.modules.update(before)
