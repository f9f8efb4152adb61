"""A GGUF file in safetensors form, made once and kept in the user's cache folder.

Reading GGUF takes many times longer than reading safetensors. The result has four bytes for each weight, so that
nothing of the file is lost.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import xxhash
from filelock import FileLock
from safetensors import SafetensorError

from fused_kv_llm.errors import MissingExtraError, ModelFileError, UnsupportedModelError
from fused_kv_llm.model.families import check_model_type, refuse_known
from fused_kv_llm.model.gguf_config import complete_config
from fused_kv_llm.model.gguf_header import GGUFHeader, read_header
from fused_kv_llm.model.gguf_parsing import parsed_once
from fused_kv_llm.paths import cache_folder

__all__ = ["converted_gguf", "gguf_in"]

# The names of model types that transformers spells otherwise.
_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "command-r": "cohere",
}
_LEFT_OUT = {"gemma4": "which shapes the KV of its layers has, and which of them share it"}
_BLOCK = 2**20
# Weights of rotations, which are no weights of the model.
_NO_WEIGHTS = ("rope_freqs.weight",)

_log = logging.getLogger(__name__)


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has no weights or tokenizer in another form; None if there is none.

    Raises
    ------
    ModelFileError
        If there are several: they are listed.
    """
    if any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin", "tokenizer*.json")):
        return None
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf" and path.is_file())
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ModelFileError(
            f"The folder {str(folder)!r} holds {len(files)} GGUF files: {names}. Give one of them, for example "
            f"model={str(files[0])!r}. A model that is split over several has to be merged first: "
            "llama-gguf-split --merge."
        )
    return files[0] if files else None


def converted_gguf(path: Path, name: str | None = None, *, trust_probe: bool = False) -> Path:
    """Return the folder with a GGUF file's model in safetensors form; converts it if there is none.

    Parameters
    ----------
    path : Path
    name : str or None
        Name of the folder, if the caller knows one that is another for other content. By default the file's name and
        a digest of its content.
    trust_probe : bool
        Whether a type of model that is on neither list may be converted.

    Returns
    -------
    Path
        A folder that ``from_pretrained`` reads.

    Raises
    ------
    ModelFileError
        If the file is damaged or no GGUF file, or cannot be converted.
    UnsupportedModelError
        If it is of a type that is not supported, which is said before it is converted, or says something of the model
        that transformers does not read.
    MissingExtraError
        If ``gguf`` is not installed.
    """
    target = cache_folder() / "models" / (name or f"{path.stem}-{_digest(path)}")
    if (target / "config.json").is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf")
    header = read_header(path)
    _check_type(header, path, trust_probe)
    _log.info("Converting %s to safetensors, once, into %s", path, target)
    # What stands in the way of a folder or of its files is said alike, wherever it is met.
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not (target / "config.json").is_file():
                _convert(path, header, target)
    except (OSError, SafetensorError) as error:
        raise ModelFileError(
            f"The GGUF file {str(path)!r} could not be converted into {str(target)!r}: {error}. That takes "
            f"{4 * header.num_elements / 1e9:.1f} GB of disk, once; the environment variable FUSED_KV_CACHE names "
            "another folder for it."
        ) from error
    return target


def _digest(path: Path) -> str:
    """Hash a file's content: its name, size and time may be those of another."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return str(digest.hexdigest())


def _check_type(header: GGUFHeader, path: Path, trust_probe: bool) -> None:
    from transformers import AutoConfig

    if header.architecture in _LEFT_OUT:
        raise UnsupportedModelError(
            f"The GGUF file {str(path)!r} is of the architecture {header.architecture!r}: what it says of "
            f"{_LEFT_OUT[header.architecture]} is left out by transformers. Load the model from its original weights "
            "(safetensors)."
        )
    model_type = _MODEL_TYPES.get(header.architecture, header.architecture.replace("-", "_"))
    try:
        config = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise UnsupportedModelError(
            f"The GGUF file {str(path)!r} is of the architecture {header.architecture!r}, which transformers does not "
            "read."
        ) from error
    if trust_probe:
        refuse_known(config, str(path))
    else:
        check_model_type(config, str(path))


def _convert(path: Path, header: GGUFHeader, target: Path) -> None:
    # A name that is known, under a lock: what a killed conversion left is removed by the next one.
    temporary = target.with_name(f".tmp-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    _check_room(header, target.parent)
    model, tokenizer = _read(path)
    complete_config(model.config, header, path)
    _check_whole(model, header, path)
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for file in temporary.iterdir():
            _sync(file)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_room(header: GGUFHeader, folder: Path) -> None:
    needed, free = 4 * header.num_elements, shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"the disk has {free / 1e9:.1f} GB left")


def _read(path: Path) -> tuple[Any, Any]:
    """Return the model in float32 and its tokenizer, both as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with parsed_once():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            model, found = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # of a file that fits no model, transformers may raise anything
        raise ModelFileError(
            f"The GGUF file {str(path)!r} cannot be read by transformers: {type(error).__name__}: {error}. Load the "
            "model from its original weights (safetensors)."
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise ModelFileError(
            f"The GGUF file {str(path)!r} lacks {len(missing)} weights of a {type(model).__name__}: "
            f"{', '.join(missing[:3])}. Fetch it again, or load the model from its original weights (safetensors)."
        )
    # The tensors are de-quantised by now; with this entry the model would refuse to be saved.
    del model.config.quantization_config
    model.hf_quantizer = None
    return model, tokenizer


def _check_whole(model: Any, header: GGUFHeader, path: Path) -> None:
    """Refuse a file with tensors for which the model has no place: transformers passes over them."""
    told = header.num_elements - sum(header.tensors[name].elements for name in _NO_WEIGHTS if name in header.tensors)
    used = sum(parameter.numel() for parameter in model.parameters())
    if told != used:
        raise UnsupportedModelError(
            f"The GGUF file {str(path)!r} holds {told:,} weights, of which transformers uses {used:,} for a "
            f"{type(model).__name__}: its answers would be wrong. Load the model from its original weights "
            "(safetensors)."
        )


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
