"""Loading a model: by alias, hub id, local path or as an object already in memory."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fused_kv_llm.errors import ConfigError, UnsupportedModelError
from fused_kv_llm.model.attention import attach_attention
from fused_kv_llm.model.cpu_layers import attach_cpu_layers
from fused_kv_llm.model.fingerprint import fingerprint_files, fingerprint_tokenizer
from fused_kv_llm.model.geometry import Geometry, read_geometry
from fused_kv_llm.model.last_row import attach_last_row
from fused_kv_llm.model.narrowing import attach_narrowing
from fused_kv_llm.model.pretrained import cached_folder, locate, read_model, read_tokenizer

__all__ = ["LoadedModel", "choose_device", "choose_dtype", "has_native_bfloat16", "load_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be fused.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In evaluation mode, its attention behind the seam.
    tokenizer : transformers.PreTrainedTokenizerFast
    model_id : str
        Alias, path, hub id, or the class name of a model given as an object.
    geometry : Geometry
    fingerprint, tokenizer_fingerprint : str
        Of the content.
    dtype : torch.dtype
    device : torch.device
    choice : str
        Which device and dtype were chosen and why.
    """

    model: Any
    tokenizer: Any
    model_id: str
    geometry: Geometry
    fingerprint: str
    tokenizer_fingerprint: str
    dtype: torch.dtype
    device: torch.device
    choice: str


def has_native_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX or Arm BF16).

    Without the instructions bfloat16 is emulated and slower than float32; with them it measured twice as
    fast.
    """
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return platform.system() == "Darwin" and platform.machine() == "arm64"
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the device to use: the one asked for, else CUDA where there is one, else the CPU.

    Raises
    ------
    ConfigError
        If the name is not a device, or it is not there.
    """
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is not a torch device, for example 'cpu' or 'cuda:0'") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but torch sees no CUDA device: use device='cpu'")
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype to compute and store in, and why.

    Parameters
    ----------
    dtype : str, torch.dtype or None
        None or ``"auto"`` decides by the device.
    device : torch.device

    Raises
    ------
    ConfigError
        If the name is not one of float32, bfloat16, float16.
    """
    if dtype is None or dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16, f"bfloat16 on {device}"
        if has_native_bfloat16():
            return torch.bfloat16, "bfloat16 on the CPU, which multiplies it in hardware"
        return torch.float32, "float32 on the CPU, which has no bfloat16 instructions"
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not supported: use one of {', '.join(_DTYPES)} or 'auto'")
    return _DTYPES[name], f"{name} on {device}, as asked"


def load_model(
    model: str | Path | Any = "smollm2-135m",
    *,
    tokenizer: str | Path | Any | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> LoadedModel:
    """Load a model and check that its KV can be fused.

    Parameters
    ----------
    model : str, Path or transformers.PreTrainedModel
        Alias ``"smollm2-135m"``, hub id, local folder, or a model in memory. A model in memory keeps its
        dtype and device, and its own ``generate`` goes on working.
    tokenizer : str, Path, tokenizer or None
        Defaults to the one that comes with the model.
    dtype, device
        See :func:`choose_dtype` and :func:`choose_device`.

    Returns
    -------
    LoadedModel

    Raises
    ------
    ModelNotFoundError
        If there is no such model.
    UnsupportedModelError
        If its KV cannot be moved, or its tokenizer gives no character offsets.
    ConfigError
        If `dtype` or `device` cannot be used.
    """
    if isinstance(model, (str, Path)):
        chosen_device = choose_device(device)
        chosen_dtype, choice = choose_dtype(dtype, chosen_device)
        folder, source = locate(str(model))
        network = read_model(source, str(model), chosen_dtype).to(chosen_device)
        folder = folder or cached_folder(source)
        model_id = str(model)
        tokenizer = source if tokenizer is None else tokenizer
    else:
        network, folder, model_id = model, None, type(model).__name__
        chosen_device, chosen_dtype = network.device, network.dtype
        _check_in_memory(network, model_id)
        choice = f"{str(chosen_dtype).removeprefix('torch.')} on {chosen_device}, as the given model has it"
        if tokenizer is None:
            raise ConfigError("A model given as an object needs its tokenizer: pass tokenizer=... as well.")
    if isinstance(tokenizer, (str, Path)):
        tokenizer = read_tokenizer(str(tokenizer), model_id)
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModelError(
            f"The tokenizer {type(tokenizer).__name__} of {model_id!r} gives no character offsets: "
            "pass a fast tokenizer (tokenizer=AutoTokenizer.from_pretrained(..., use_fast=True))."
        )
    geometry = read_geometry(network, model_id)
    network.eval()
    attach_attention(network)
    attach_last_row(network)
    attach_narrowing(network)
    if chosen_device.type == "cpu":
        attach_cpu_layers(network)
    return LoadedModel(
        model=network,
        tokenizer=tokenizer,
        model_id=model_id,
        geometry=geometry,
        fingerprint=fingerprint_files(network, folder),
        tokenizer_fingerprint=fingerprint_tokenizer(tokenizer),
        dtype=chosen_dtype,
        device=chosen_device,
        choice=choice,
    )


def _check_in_memory(network: Any, model_id: str) -> None:
    if network.dtype not in _DTYPES.values():
        raise ConfigError(
            f"The model {model_id!r} is of dtype {network.dtype}: convert it with model.to(...) to one of "
            f"{', '.join(_DTYPES)}."
        )
    if any(parameter.device.type == "meta" for parameter in network.parameters()):
        raise ConfigError(
            f"The model {model_id!r} has weights on the meta device, or offloaded: load it whole, on one device."
        )
