"""Which kinds of weights can be used: where they are, how they are quantised, and what wraps them."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError, MissingExtraError, UnsupportedModelError
from fused_kv_llm.model.adapters import check_adapters
from fused_kv_llm.model.deviation import by_layer, worst
from fused_kv_llm.model.structure import check_compiled

__all__ = [
    "FAILURES",
    "check_quantization_packages",
    "check_rows",
    "check_weights",
    "is_quantised",
    "quantization_method",
    "unwrapped",
]

# Import names of what transformers needs for a method of quantisation, by the method.
_PACKAGES = {
    "aqlm": ("aqlm",),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",),
    "eetq": ("eetq",),
    "gptq": ("optimum", "gptqmodel"),
    "hqq": ("hqq",),
    "quanto": ("optimum.quanto",),
    "torchao": ("torchao",),
    "vptq": ("vptq",),
}
_DISTRIBUTIONS = {"compressed_tensors": "compressed-tensors", "optimum.quanto": "optimum-quanto"}
_QUANTISING = ("torch.ao.", "bitsandbytes.", "hqq.", "gptqmodel.", "compressed_tensors.", "optimum.")
# What packages raise for weights that they cannot read or run here.
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
_INSTEAD = (
    "Weights that are quantised alone can be used: bitsandbytes with load_in_4bit, torchao's Int8WeightOnlyConfig, "
    "GPTQ and AWQ."
)


def check_quantization_packages(config: Any, model_id: str) -> None:
    """Refuse a configuration of quantised weights if a package that reads them is not installed.

    Parameters
    ----------
    config : transformers.PretrainedConfig
    model_id : str
        The model's name, for messages.

    Raises
    ------
    MissingExtraError
    """
    method = quantization_method(config)
    for package in _PACKAGES.get(method or "", ()):
        if not _is_installed(package):
            raise MissingExtraError(
                _DISTRIBUTIONS.get(package, package), reason=f"The weights of {model_id!r} are quantised by {method!r}"
            )


def _is_installed(package: str) -> bool:
    root = package.partition(".")[0]
    return importlib.util.find_spec(root) is not None and importlib.util.find_spec(package) is not None


def quantization_method(config: Any) -> str | None:
    """Return how a configuration's weights are quantised, for example ``"gptq"``; None if they are not."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method)).removesuffix("_4bit").removesuffix("_8bit")


def unwrapped(model: Any) -> Any:
    """Return the transformers model in what a user gives: without the wrappers of ``torch.compile`` and of PEFT.

    A PEFT model's adapters are layers inside of it and stay in effect.

    Raises
    ------
    UnsupportedModelError, ConfigError
        If its adapters cannot be used, or it is no transformers model.
    """
    from transformers import PreTrainedModel

    given = type(model).__name__
    while not isinstance(model, PreTrainedModel):
        if isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and isinstance(getattr(model, "base_model", None), torch.nn.Module):
            check_adapters(model, given)
            model = model.base_model if isinstance(model.base_model, PreTrainedModel) else model.base_model.model
        else:
            raise ConfigError(
                f"A model of type {given} was given: pass a name, a folder, or a transformers model for causal "
                "language modelling (AutoModelForCausalLM), alone or with PEFT adapters."
            )
    return model


def check_weights(model: Any, model_id: str) -> None:
    """Refuse weights that are not whole on one device, or not as they were made to be run.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    model_id : str
        Its name, for messages.

    Raises
    ------
    UnsupportedModelError, ConfigError
    """
    placed = getattr(model, "hf_device_map", None) or {}
    devices = {str(parameter.device) for parameter in model.parameters()}
    if "meta" in devices or "disk" in map(str, placed.values()):
        raise ConfigError(
            f"The model {model_id!r} has weights on the meta device, or offloaded: load it whole, on one device."
        )
    if len(devices) > 1 or len({str(torch.device(place)) for place in placed.values()}) > 1:
        raise UnsupportedModelError(
            f"The model {model_id!r} is on several devices ({', '.join(sorted(devices))}), by a device_map or by "
            "offloading: KV is kept on one. Load it with device_map={'': 'cuda:0'} or without a device_map, quantised "
            "to 4 bits if it does not fit."
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ConfigError(
            f"The model {model_id!r} was made under torch.inference_mode(), where changes of its weights leave no "
            "trace: load it outside of it, and run it there."
        )
    check_compiled(model, model_id)
    check_adapters(model, model_id)
    for name, module in model.named_modules():
        if type(module).__module__.startswith("bitsandbytes.") and float(_threshold(module)) > 0:
            raise UnsupportedModelError(
                f"The 8-bit weights of {model_id!r} ({name}, ...) are multiplied apart from columns whose activations "
                f"exceed llm_int8_threshold={_threshold(module)} in any token of a forward, so a token's KV would "
                "depend on the tokens beside it. Load it with BitsAndBytesConfig(load_in_8bit=True, "
                "llm_int8_threshold=0.0), or with load_in_4bit=True."
            )


def _threshold(module: Any) -> float:
    return getattr(getattr(module, "state", None), "threshold", 0.0) or 0.0


def is_quantised(model: Any) -> bool:
    """Return whether a model has weights that are not plain floating-point tensors."""
    plain = all(
        type(parameter) is torch.nn.Parameter
        and type(parameter.data) is Tensor
        and parameter.is_floating_point()
        and parameter.dtype.itemsize > 1
        for parameter in model.parameters()
    )
    return not plain or any(type(module).__module__.startswith(_QUANTISING) for module in model.modules())


def check_rows(model: Any, model_id: str) -> None:
    """Make sure that what quantised layers compute for a token does not depend on the other tokens of a forward.

    Activations that are rounded by the largest of a whole forward would give a token other KV in every prompt. It
    shows in the first layer, before rounding could add up.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A quantised one.
    model_id : str
        Its name, for messages.

    Raises
    ------
    UnsupportedModelError
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(24, device=model.device)[None] * 37 % vocabulary
    try:
        with torch.inference_mode():
            alone, beside = (model(part, use_cache=True).past_key_values.layers[0] for part in (ids[:, :8], ids))
    except FAILURES as error:
        raise UnsupportedModelError(
            f"The quantised weights of {model_id!r} cannot be run on {model.device} "
            f"({type(error).__name__}: {str(error)[:300]}). They may not be what their configuration says, or need "
            f"another device. {_INSTEAD}"
        ) from error
    pairs = [(getattr(beside, part)[0, :, :8], getattr(alone, part)[0]) for part in ("keys", "values")]
    found = worst(by_layer(pairs), model.dtype)
    if found is not None:
        raise UnsupportedModelError(
            f"The quantised weights of {model_id!r} cannot be used: what they compute for a token depends on the other "
            f"tokens of the same forward (keys or values of the first layer change by {found.deviation:.1%}), so it "
            f"cannot be stored. {_INSTEAD}"
        )
