"""Loading a model: by alias, hub id, local path or as an object already in memory."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fused_kv_llm.errors import ConfigError, ModelChangedError, UnsupportedModelError
from fused_kv_llm.model.attention import attach_attention
from fused_kv_llm.model.families import check_model_type
from fused_kv_llm.model.fast_check import attach_checked
from fused_kv_llm.model.fingerprint import fingerprint_files, fingerprint_tokenizer
from fused_kv_llm.model.geometry import Geometry
from fused_kv_llm.model.last_row import attach_last_row
from fused_kv_llm.model.narrowing import attach_narrowing
from fused_kv_llm.model.pretrained import read_tokenizer
from fused_kv_llm.model.reading import read_named
from fused_kv_llm.model.snapshot import ModelSnapshot
from fused_kv_llm.model.verification import read_geometry
from fused_kv_llm.model.weights import check_rows, check_weights, is_quantised, unwrapped

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
    snapshot : ModelSnapshot
        What the model was when the fingerprint was taken.
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
    snapshot: ModelSnapshot

    def check_unchanged(self) -> None:
        """Make sure that the model is still the one that its fingerprint is of; takes less than a millisecond.

        Raises
        ------
        ModelChangedError
            If an adapter was switched, a part hooked, patched or exchanged, or weights were written to.
        """
        changes = self.snapshot.changes()
        if changes:
            raise ModelChangedError(
                f"The model {self.model_id!r} was changed after this engine was made: {'; '.join(changes)}. Its stored "
                "KV is of the model as it was. Change it back, or make a new engine of the model as it is now: that "
                "finds the KV which was stored for it."
            )


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
    trust_probe: bool = False,
) -> LoadedModel:
    """Load a model and check that its KV can be fused.

    Parameters
    ----------
    model : str, Path, transformers.PreTrainedModel or peft.PeftModel
        Alias ``"smollm2-135m"``, hub id, local folder (also of a PEFT adapter), GGUF file, or a model in memory. A
        model in memory keeps its dtype and device, and its own ``generate`` goes on working.
    tokenizer : str, Path, tokenizer or None
        Defaults to the one that comes with the model.
    dtype, device
        See :func:`choose_dtype` and :func:`choose_device`.
    trust_probe : bool
        Whether to take a model whose type is on neither list of :mod:`.families` if it passes the checks of
        :mod:`.verification`; a warning says so.

    Returns
    -------
    LoadedModel

    Raises
    ------
    ModelNotFoundError
        If there is no such model.
    UnsupportedModelError
        If its KV cannot be moved, its weights or adapters are of a kind that cannot be used, or its tokenizer gives
        no character offsets.
    ModelFileError
        If its files are damaged or do not fit each other.
    MissingExtraError
        If a package that reads its weights is not installed.
    ConfigError
        If `dtype` or `device` cannot be used.
    """
    found = (
        _read(str(model), dtype, device, tokenizer, trust_probe=trust_probe)
        if isinstance(model, (str, Path))
        else _given(model, tokenizer, trust_probe=trust_probe)
    )
    network, model_id = found.network, found.model_id
    tokenizer = _tokenizer_with_offsets(found.tokenizer, model_id)
    network.eval()
    attach_attention(network)
    attach_last_row(network)
    attach_narrowing(network)
    if is_quantised(network):
        check_rows(network, model_id)
    geometry = read_geometry(network, model_id)
    if found.device.type == "cpu":
        attach_checked(network, geometry, model_id)
    return LoadedModel(
        model=network,
        tokenizer=tokenizer,
        model_id=model_id,
        geometry=geometry,
        fingerprint=fingerprint_files(network, found.folders),
        tokenizer_fingerprint=fingerprint_tokenizer(tokenizer),
        dtype=found.dtype,
        device=found.device,
        choice=found.choice,
        snapshot=ModelSnapshot(network),
    )


@dataclass(frozen=True, slots=True)
class _Network:
    """A checked network before anything is attached to it; the tokenizer may be a name still."""

    network: Any
    model_id: str
    tokenizer: Any
    folders: tuple[Path, ...]
    dtype: torch.dtype
    device: torch.device
    choice: str


def _read(
    name: str, dtype: str | torch.dtype | None, device: str | torch.device | None, tokenizer: Any, *, trust_probe: bool
) -> _Network:
    chosen_device = choose_device(device)
    chosen_dtype, choice = choose_dtype(dtype, chosen_device)
    read = read_named(name, chosen_dtype, chosen_device, trust_probe=trust_probe)
    network = unwrapped(read.network)
    check_weights(network, name)
    if network.dtype != chosen_dtype:
        chosen_dtype = network.dtype
        choice = f"{_name(chosen_dtype)} on {chosen_device}, as its weights are quantised"
    own = read.tokenizer if tokenizer is None else tokenizer
    return _Network(network, name, own, read.folders, chosen_dtype, chosen_device, choice)


def _given(model: Any, tokenizer: Any, *, trust_probe: bool) -> _Network:
    network = unwrapped(model)
    model_id = type(network).__name__
    _check_dtype(network, model_id)
    check_weights(network, model_id)
    check_model_type(network.config, model_id, trust_probe=trust_probe)
    if tokenizer is None:
        raise ConfigError("A model given as an object needs its tokenizer: pass tokenizer=... as well.")
    choice = f"{_name(network.dtype)} on {network.device}, as the given model has it"
    return _Network(network, model_id, tokenizer, (), network.dtype, network.device, choice)


def _tokenizer_with_offsets(tokenizer: Any, model_id: str) -> Any:
    if isinstance(tokenizer, (str, Path)):
        tokenizer = read_tokenizer(str(tokenizer), model_id)
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModelError(
            f"The tokenizer {type(tokenizer).__name__} of {model_id!r} gives no character offsets: "
            "pass a fast tokenizer (tokenizer=AutoTokenizer.from_pretrained(..., use_fast=True))."
        )
    return tokenizer


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_dtype(network: Any, model_id: str) -> None:
    if network.dtype not in _DTYPES.values():
        raise ConfigError(
            f"The model {model_id!r} is of dtype {network.dtype}: convert it with model.to(...) to one of "
            f"{', '.join(_DTYPES)}."
        )
