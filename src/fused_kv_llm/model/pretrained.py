"""Where a model's files come from: the embedded ones, a local folder or GGUF file, or the hub and its cache.

An id that is not in the cache is asked for once before transformers looks for it. Without a network its client would
try six times, with growing pauses, and say so only after half a minute.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fused_kv_llm.errors import ModelError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from fused_kv_llm.model.embedded import EMBEDDED_MODELS, embedded_model_folder
from fused_kv_llm.model.families import check_model_type
from fused_kv_llm.model.gguf_conversion import converted_gguf, gguf_in
from fused_kv_llm.model.weights import FAILURES, check_quantization_packages, quantization_method
from fused_kv_llm.reading_lock import READING

__all__ = ["cached_folder", "locate", "read_model", "read_tokenizer"]

_PAUSE_S = 0.5


def locate(model: str, *, trust_probe: bool = False) -> tuple[Path | None, str]:
    """Return the folder of a model, None if it is the hub's, and what ``from_pretrained`` takes.

    Parameters
    ----------
    model : str
        Alias, local folder, GGUF file or hub id. A GGUF file, also one in a folder that has no other weights, is
        converted; the folder that is returned is the result.
    trust_probe : bool
        Whether a GGUF file of a type that is on neither list may be converted.

    Raises
    ------
    ModelNotFoundError, MissingExtraError
        If it is an alias, and the package that carries the model, or one that reads it, is not installed.
    ModelFileError
        If it is a file and no GGUF file, a damaged one, or a folder with several.
    UnsupportedModelError
        If it is a GGUF file of a model that is not supported.
    """
    if model in EMBEDDED_MODELS:
        folder = embedded_model_folder(model)
        return folder, str(folder)
    path = Path(model)
    file = gguf_in(path) if path.is_dir() else path if path.is_file() else None
    if file is not None:
        folder = converted_gguf(file, trust_probe=trust_probe)
        return folder, str(folder)
    if path.is_dir():
        return path, model
    return None, model


def read_model(
    source: str, model_id: str, dtype: torch.dtype, device: torch.device, *, trust_probe: bool = False
) -> Any:
    """Read configuration and weights.

    Parameters
    ----------
    source : str
        A folder or a hub id.
    model_id : str
        What the user calls it.
    dtype : torch.dtype
    device : torch.device
    trust_probe : bool
        Whether a type that is on neither list may be tried.

    Returns
    -------
    transformers.PreTrainedModel

    Raises
    ------
    ModelNotFoundError
        If there is no such model, or it cannot be had from here.
    UnsupportedModelError
        If it is of a type whose KV cannot be moved; its weights are not read then. If its quantised weights cannot be
        read here.
    MissingExtraError
        If a package that reads its quantised weights is not installed.
    ModelFileError
        If its weights are damaged, or are not those that its configuration describes.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    _check_within_reach(source, model_id, "config.json")
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and (Path(source) / "config.json").is_file():
            raise UnsupportedModelError(f"The model {model_id!r} is not supported: {error}") from error
        raise _not_found(model_id, error) from error
    # Before the weights are read, which takes long for a model that is refused anyway.
    check_model_type(config, model_id, trust_probe=trust_probe)
    check_quantization_packages(config, model_id)
    method = quantization_method(config)
    try:
        # What is quantised is put in its place while it is read.
        place = {} if method is None else {"device_map": {"": device}}
        # Models that also see images have another class, of which the text model is used.
        is_text_only = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto = AutoModelForCausalLM if is_text_only else AutoModelForImageTextToText
        with READING:
            network = auto.from_pretrained(source, dtype=dtype, **place)
    except SafetensorError as error:
        raise ModelFileError(f"The weights of {model_id!r} are damaged ({error}): get them again.") from error
    except FAILURES as error:
        if method is None and not isinstance(error, (ImportError, OSError, ValueError, RuntimeError)):
            raise
        raise _unreadable(model_id, method, error) from error
    return network if method is not None else network.to(device)


def _unreadable(model_id: str, method: str | None, error: Exception) -> ModelError:
    if method is not None:
        return UnsupportedModelError(
            f"The weights of {model_id!r} are quantised by {method!r} and cannot be read here: {str(error)[:300]}. Use "
            "weights of another kind, such as plain ones with dtype='bfloat16', or a package version that reads them."
        )
    if isinstance(error, ImportError):
        return UnsupportedModelError(
            f"The model {model_id!r} has parts that need a package which is not installed: {str(error).strip()}"
        )
    if isinstance(error, (OSError, ValueError)):
        return _not_found(model_id, error)
    return ModelFileError(f"The weights of {model_id!r} do not fit its configuration: {str(error)[:300]}")


def read_tokenizer(source: str, model_id: str) -> Any:
    """Read a tokenizer.

    Parameters
    ----------
    source : str
        A folder, a GGUF file, an alias or a hub id.
    model_id : str
        What the user calls the model.

    Raises
    ------
    ModelNotFoundError
        If there is none, or it cannot be had from here.
    """
    from transformers import AutoTokenizer

    # A tokenizer can be had from any file, whatever its model is.
    _, source = locate(source, trust_probe=True)
    _check_within_reach(source, source, "tokenizer_config.json")
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise _not_found(model_id, error) from error


def cached_folder(model: str) -> Path | None:
    """Return the folder in which the hub's files of a loaded model are kept, if they are."""
    from transformers.utils import cached_file

    try:
        config = cached_file(model, "config.json", local_files_only=True)
    except OSError:
        return None
    return Path(config).parent if config is not None else None


def _check_within_reach(source: str, model_id: str, file_name: str) -> None:
    """Refuse an id that is nowhere on this machine while the hub cannot be reached.

    Whatever else is wrong with it, transformers says.
    """
    import httpx
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if Path(source).is_dir():
        return
    for attempt in range(2):
        try:
            if try_to_load_from_cache(source, file_name, cache_dir=constants.HF_HUB_CACHE) is None:
                get_hf_file_metadata(hf_hub_url(source, file_name))
        except httpx.ConnectError as error:
            # A name server may miss a first question.
            if attempt:
                raise _out_of_reach(model_id, error) from error
            time.sleep(_PAUSE_S)
        except httpx.ConnectTimeout as error:
            raise _out_of_reach(model_id, error) from error
        except (httpx.HTTPError, OSError, ValueError):
            return
        else:
            return


def _out_of_reach(model_id: str, error: Exception) -> ModelNotFoundError:
    from huggingface_hub import constants

    return ModelNotFoundError(
        f"No model {model_id!r} on this machine: it is neither an alias ({', '.join(EMBEDDED_MODELS)}), nor a local "
        f"folder or GGUF file, nor in the hub's cache ({constants.HF_HUB_CACHE}), and {constants.ENDPOINT} cannot be "
        f"reached from here ({error}). Check the spelling, or the network; a model that was downloaded elsewhere can "
        "be given as a folder."
    )


def _not_found(model_id: str, error: Exception) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"No model {model_id!r}: it is neither an alias ({', '.join(EMBEDDED_MODELS)}), nor a local folder with "
        f"a model, nor a GGUF file, nor a hub id that can be read from here ({type(error).__name__}: "
        f"{str(error)[:200]})"
    )
