"""PEFT adapters in folders: which base model one is for, and putting it into that."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from fused_kv_llm.errors import MissingExtraError, ModelFileError
from fused_kv_llm.reading_lock import READING

__all__ = ["add_adapter", "base_of_adapter"]

_CONFIG = "adapter_config.json"


def base_of_adapter(folder: Path) -> str | None:
    """Return the name of the base model of the adapter in a folder; None if the folder has a whole model, or none.

    Raises
    ------
    ModelFileError
        If the adapter's configuration cannot be read, or names no base.
    MissingExtraError
        If ``peft`` is not installed.
    """
    file = folder / _CONFIG
    if not file.is_file() or (folder / "config.json").is_file():
        return None
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("peft", "adapters", reason=f"{folder} is an adapter")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        name = config["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFileError(
            f"The adapter's configuration {file} cannot be read ({error!r}): save it again."
        ) from error
    if not isinstance(name, str) or not name:
        raise ModelFileError(
            f"The adapter's configuration {file} names no base model: write its folder or hub id there as "
            "'base_model_name_or_path'."
        )
    beside = folder / name
    return str(beside) if not Path(name).is_absolute() and beside.is_dir() else name


def add_adapter(base: Any, folder: Path) -> Any:
    """Return a base model with the adapter of a folder, active.

    Parameters
    ----------
    base : transformers.PreTrainedModel
    folder : Path

    Returns
    -------
    peft.PeftModel

    Raises
    ------
    ModelFileError
        If its weights are missing, damaged, or not for this base.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    if not any((folder / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        raise ModelFileError(f"The adapter in {folder} has no weights (adapter_model.safetensors): save it again.")
    try:
        with READING:
            return PeftModel.from_pretrained(base, str(folder))
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise ModelFileError(
            f"The adapter in {folder} cannot be put into its base {base.name_or_path!r}: {str(error)[:300]}"
        ) from error
