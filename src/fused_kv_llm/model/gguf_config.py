"""What a GGUF file says of a model, and transformers leaves out when it makes a configuration of it.

A setting that is left out keeps the default of its class, and the model answers, wrongly. So whatever the file says is
compared with the configuration: what can be taken over is, and what cannot is refused. Rotations are the main case:
their scaling stands in settings, or in tensors with one factor for each frequency.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_kv_llm.errors import UnsupportedModelError
from fused_kv_llm.model.gguf_header import GGUFHeader

__all__ = ["complete_config"]

# Settings of a file and the attributes of a configuration that must say the same.
_SAME = {
    "attention.sliding_window": "sliding_window",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
}
_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
# Where Llama 3 scales its rotation: the same in every model of 3.1, 3.2 and 3.3; only the factor differs.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def complete_config(config: Any, header: GGUFHeader, path: Path) -> None:
    """Take over what a file says of rotations, and compare the rest.

    Parameters
    ----------
    config : transformers.PretrainedConfig
        What transformers made of the file; changed.
    header : GGUFHeader
    path : Path
        For messages, and to read rotary factors from.

    Raises
    ------
    UnsupportedModelError
        If the file says something that the configuration does not, and that cannot be taken over.
    """
    for name, attribute in _SAME.items():
        told, used = header.setting(name), getattr(config, attribute, None)
        if attribute == "head_dim":
            used = _head_dim(config)
        if told and not _close(told, used):
            raise _refuse(path, f"{name}={told}", f"{attribute}={used}")
    _check_query_scale(config, path)
    _complete_rotation(config, header, path)


def _complete_rotation(config: Any, header: GGUFHeader, path: Path) -> None:
    rotation, windowed = _rotations(config)
    for name, parameters in (("rope.freq_base", rotation), ("rope.freq_base_swa", windowed)):
        theta, used = header.setting(name), parameters.get("rope_theta")
        if theta and not _close(theta, used):
            raise _refuse(path, f"{name}={theta}", f"rope_theta={used}")
    width = header.setting("rope.dimension_count")
    share = rotation.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if width and width != int(_head_dim(config) * share):
        raise _refuse(path, f"rope.dimension_count={width}", f"{int(_head_dim(config) * share)} rotated dimensions")
    for name in _LONG_FACTORS:
        if name in header.tensors:
            raise _refuse(path, f"the tensor {name}, which scales rotations by the prompt's length", "no such scaling")
    scaling, factor = header.setting("rope.scaling.type"), header.setting("rope.scaling.factor")
    if scaling == "linear" and factor:
        rotation.update(rope_type="linear", factor=float(factor))
    elif scaling not in (None, "", "none", "linear", rotation.get("rope_type")):
        raise _refuse(path, f"rope.scaling.type={scaling!r}", "no such scaling")
    if _FACTORS in header.tensors:
        _take_llama3(config, rotation, _read_factors(header, path), path)


def _rotations(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary parameters of layers that see everything before them, and of those with a window."""
    parameters = getattr(config, "rope_parameters", None) or {}
    whole = parameters.get("full_attention", parameters)
    return whole, parameters.get("sliding_attention", whole)


def _take_llama3(config: Any, rotation: dict[str, Any], factors: Tensor, path: Path) -> None:
    """Recognise Llama 3's scaling by the factors that it gives; refuse any other."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    width = _head_dim(config)
    plain = 1.0 / rotation["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    before = dict(rotation)
    rotation.update(rope_type="llama3", factor=float(factors.max()), **_LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if factors.shape != plain.shape or not torch.allclose(plain / factors, scaled, rtol=1e-4):
        rotation.clear()
        rotation.update(before)
        raise _refuse(path, f"the tensor {_FACTORS}, which is not Llama 3's", "no such scaling")


def _read_factors(header: GGUFHeader, path: Path) -> Tensor:
    tensor = header.tensors[_FACTORS]
    if tensor.dtype != 0:
        raise _refuse(path, f"the tensor {_FACTORS} in type {tensor.dtype}", "none")
    return torch.from_numpy(np.fromfile(path, np.float32, tensor.elements, offset=tensor.begin))


def _check_query_scale(config: Any, path: Path) -> None:
    """Refuse Gemma's largest models, whose queries are scaled by a number that their files do not say."""
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if scalar is not None and scalar != _head_dim(config):
        raise _refuse(path, f"attention heads of {_head_dim(config)}", f"query_pre_attn_scalar={scalar}")


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _close(told: Any, used: Any) -> bool:
    """Whether two numbers are the same to float32, in which files keep them."""
    return isinstance(used, (int, float)) and abs(told - used) <= 1e-6 * abs(told)


def _refuse(path: Path, told: str, used: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The GGUF file {str(path)!r} has {told}, of which transformers makes {used}: its answers would be wrong. Load "
        "the model from its original weights (safetensors)."
    )
