"""Checkpoints whose experts have 4-bit or 8-bit weights, loaded by transformers' own loader without dequantising the experts.

transformers chooses a quantizer by the ``quant_method`` of a configuration, and accepts additional ones: those here replace the experts'
modules before the weights are loaded. Everything else in a model is loaded, or dequantised, by transformers as usual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashmoe.errors import ArgumentError
from flashmoe.integrations.transformers.experts import Mxfp4Experts

PREFIX = "fmoe_"  # of our names for transformers' methods
METHODS = ("fp8", "mxfp4")


def packed_config(checkpoint: Any, **options: Any) -> Any:
    """The configuration of a quantised checkpoint, with which ``from_pretrained`` keeps its experts' weights as they are stored::

        config = packed_config("openai/gpt-oss-20b")
        model = AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b", config=config, experts_implementation=names.experts)

    The experts then run as :func:`flashmoe.fused_moe` on such weights: mxfp4 (gpt-oss; repacked once in place on compute capability
    9.0, by :func:`flashmoe.pack_mxfp4`), or e4m3 with a scale per 128 by 128 block
    (Qwen3-MoE FP8, DeepSeek-V3). Other layers with 8-bit weights are dequantised, on GPUs too. Call :func:`register` first.

    Args:
        checkpoint: a name or folder, as for ``from_pretrained``, or a configuration, which is changed and returned.
        options: for ``AutoConfig.from_pretrained``, such as ``revision``.

    Raises:
        ArgumentError: the checkpoint is not quantised by one of these methods, or this version of transformers cannot load it this way.
    """
    from transformers import AutoConfig
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    config = checkpoint if hasattr(checkpoint, "to_dict") else AutoConfig.from_pretrained(checkpoint, **options)
    given = getattr(config, "quantization_config", None) or {}
    quantization = dict(given if isinstance(given, dict) else given.to_dict())
    method = str(getattr(quantization.get("quant_method"), "value", quantization.get("quant_method"))).removeprefix(
        PREFIX
    )
    if method not in METHODS:
        msg = (
            f"the checkpoint's quant_method is {method}; supported: {', '.join(METHODS)}; load it without packed_config"
        )
        raise ArgumentError(msg)
    if PREFIX + method not in AUTO_QUANTIZER_MAPPING:
        import transformers

        msg = (
            f"transformers {transformers.__version__} cannot keep the experts of an {method} checkpoint packed, or register() was not "
            "called; call flashmoe.integrations.transformers.register() first, with transformers 5.23 or later"
        )
        raise ArgumentError(msg)
    config.quantization_config = {**quantization, "quant_method": PREFIX + method}
    return config


def register_quantizers() -> None:
    """Register this module's quantisation methods with transformers; a second call changes nothing."""
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer

    made = {"mxfp4": _mxfp4}
    if hasattr(
        HfQuantizer, "get_load_operations"
    ):  # older versions let a quantizer say nothing about how weights other than the experts' are loaded
        made["fp8"] = _fp8
    for method, make in made.items():
        if PREFIX + method not in auto.AUTO_QUANTIZER_MAPPING:
            config, quantizer = make()
            auto.register_quantization_config(PREFIX + method)(config)
            auto.register_quantizer(PREFIX + method)(quantizer)


def _mxfp4() -> tuple[type, type]:
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import Mxfp4Config

    class PackedMxfp4Config(Mxfp4Config):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.quant_method: Any = PREFIX + "mxfp4"

        def to_dict(self) -> dict[str, Any]:
            # So that the saved checkpoint is an ordinary mxfp4 one
            return {**super().to_dict(), "quant_method": "mxfp4"}

    class PackedMxfp4Quantizer(HfQuantizer):
        requires_calibration = False
        is_trainable = False

        def is_serializable(self, **_: Any) -> bool:
            return True

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

            for name, module in list(model.named_modules()):
                if isinstance(module, GptOssExperts):
                    with torch.device("meta"):
                        model.set_submodule(name, Mxfp4Experts(module))

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
            for module in model.modules():
                if isinstance(module, Mxfp4Experts):
                    module.pack()

    return PackedMxfp4Config, PackedMxfp4Quantizer


def _fp8() -> tuple[type, type]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, replace_with_fp8_linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    class PackedFp8Config(FineGrainedFP8Config):
        pass

    class PackedFp8Quantizer(FineGrainedFP8HfQuantizer):
        is_trainable = False

        def is_serializable(self, **_: Any) -> bool:
            return False  # some weights are dequantised

        def validate_environment(self, *_: Any, **__: Any) -> None:
            """Accepts any device."""

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            others = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            replace_with_fp8_linear(
                model,
                modules_to_not_convert=[*others, *(self.quantization_config.modules_to_not_convert or ())],
                quantization_config=self.quantization_config,
                pre_quantized=True,
            )

        def get_load_operations(self) -> dict[str, Any]:
            return {"deserialize": Fp8Dequantize, "dequantize": Fp8Dequantize}

    return PackedFp8Config, PackedFp8Quantizer
