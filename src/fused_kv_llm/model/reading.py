"""Reading a model by its name: whole, or an adapter and the base model that it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fused_kv_llm.errors import ModelNotFoundError
from fused_kv_llm.model.adapter_files import add_adapter, base_of_adapter
from fused_kv_llm.model.pretrained import cached_folder, locate, read_model

__all__ = ["ReadModel", "read_named"]


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model from files.

    Parameters
    ----------
    network : torch.nn.Module
        A transformers model, wrapped by PEFT if there is an adapter.
    folders : tuple of Path
        Where its files are, those of an adapter and of its base.
    tokenizer : str
        Where the tokenizer is that comes with it.
    """

    network: Any
    folders: tuple[Path, ...]
    tokenizer: str


def read_named(name: str, dtype: torch.dtype, device: torch.device, *, trust_probe: bool = False) -> ReadModel:
    """Read a model.

    Parameters
    ----------
    name : str
        Alias, hub id, folder, file, or the folder of a PEFT adapter.
    dtype : torch.dtype
    device : torch.device
    trust_probe : bool
        Whether a type that is on neither list may be tried.

    Returns
    -------
    ReadModel

    Raises
    ------
    ModelNotFoundError, ModelFileError, UnsupportedModelError, MissingExtraError
        If it cannot be had, read or used.
    """
    path = Path(name)
    base = base_of_adapter(path)
    if base is not None:
        return _with_adapter(path, base, partial(read_named, dtype=dtype, device=device, trust_probe=trust_probe))
    folder, source = locate(name, trust_probe=trust_probe)
    network = read_model(source, name, dtype, device, trust_probe=trust_probe)
    folder = folder or cached_folder(source)
    return ReadModel(network, () if folder is None else (folder,), source)


def _with_adapter(folder: Path, base: str, read_base: Callable[[str], ReadModel]) -> ReadModel:
    try:
        read = read_base(base)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"The base model of the adapter in {folder} cannot be had. {error}") from error
    network = add_adapter(read.network, folder)
    own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return ReadModel(network, (*read.folders, folder), str(folder) if own else read.tokenizer)
