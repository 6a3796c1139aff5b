"""SGLang for tests that run without it: what flashmoe.integrations.sglang imports and receives."""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor

from tests.integrations.engines import link, module


class SglangBackend:
    """The attributes of the base class."""


@dataclass
class KVWriteLoc:
    loc: Tensor
    swa_loc: Tensor | None = None


@dataclass
class Mode:
    kind: str = "extend"

    def is_idle(self) -> bool:
        return self.kind == "idle"

    def is_decode(self) -> bool:
        return self.kind == "decode"

    def is_target_verify(self) -> bool:
        return self.kind == "verify"


@dataclass
class Pool:
    """Keys and values [slots, kv heads, D] of one layer."""

    keys: Tensor
    values: Tensor
    written: list[Any] = field(default_factory=list)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.values

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: KVWriteLoc,
        cache_k: Tensor,
        cache_v: Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        for cached, new, scale in ((self.keys, cache_k, k_scale), (self.values, cache_v, v_scale)):
            cached[loc_info.loc] = (new if scale is None else new / scale).to(cached.dtype)


def sglang_stand_ins() -> dict[str, ModuleType]:
    backends: dict[str, Any] = {}
    choices: list[str] = []
    srt = "sglang.srt"

    def register(name: str) -> Any:
        return lambda function: backends.setdefault(name, function)

    names = {
        f"{srt}.server_args": module(f"{srt}.server_args", ATTENTION_BACKEND_CHOICES=choices, add_attention_backend_choices=choices.extend),
        f"{srt}.layers.attention.attention_registry": module(
            f"{srt}.layers.attention.attention_registry", ATTENTION_BACKENDS=backends, register_attention_backend=register
        ),
        f"{srt}.layers.attention.base_attn_backend": module(f"{srt}.layers.attention.base_attn_backend", AttentionBackend=SglangBackend),
        f"{srt}.mem_cache.memory_pool": module(f"{srt}.mem_cache.memory_pool", KVWriteLoc=KVWriteLoc),
    }  # fmt: skip
    for folder in ("sglang", srt, f"{srt}.layers", f"{srt}.layers.attention", f"{srt}.mem_cache"):
        names[folder] = module(folder)
    link(names)
    return names
