"""Content fingerprints of models and tokenizers.

A name is not an identity: the same hub id can carry other weights tomorrow. The weights themselves are hashed, with
the configuration, the adapters in effect, and whatever else decides what a forward does with them. For models read from
files the hash of the weights is remembered beside the files' sizes and times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from fused_kv_llm.model.adapters import ForwardNames
from fused_kv_llm.model.content_hash import ContentHash, hash_of
from fused_kv_llm.model.structure import describe_structure
from fused_kv_llm.paths import cache_folder, write_atomically

__all__ = [
    "IRRELEVANT_SETTINGS",
    "fingerprint_files",
    "fingerprint_model",
    "fingerprint_tokenizer",
    "fingerprint_weights",
]

# What a configuration says besides how a forward goes.
IRRELEVANT_SETTINGS = frozenset(
    ("_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
     "max_position_embeddings", "output_attentions", "output_hidden_states", "pad_token_id", "return_dict",
     "torch_dtype", "transformers_version", "use_cache")
)  # fmt: skip
_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.json")


def fingerprint_model(model: Any) -> str:
    """Hash everything that decides the KV that a model computes, besides its dtype and its rotation.

    Parameters
    ----------
    model : transformers.PreTrainedModel

    Returns
    -------
    str
        128-bit xxh3, hexadecimal.

    Raises
    ------
    ConfigError
        If weights have no content here.
    """
    return _joined(fingerprint_weights(model), model)


def fingerprint_files(model: Any, folders: Iterable[Path]) -> str:
    """Return :func:`fingerprint_model`, the weights remembered for models whose files have not changed.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As it was loaded.
    folders : iterable of Path
        Where its files are, its adapter's included; empty for a model that was given as an object.

    Returns
    -------
    str
    """
    files = sorted(file for folder in folders for pattern in _FILES for file in folder.glob(pattern))
    # How weights are quantised while they are loaded is a matter of a library's release as well.
    if not files or getattr(model, "is_quantized", False):
        return fingerprint_model(model)
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    described = json.dumps(["weights", type(model).__name__, str(model.dtype), stats])
    memo = cache_folder() / "fingerprints" / hashlib.sha256(described.encode()).hexdigest()
    remembered = memo.read_text().strip() if memo.exists() else ""
    if len(remembered) != 32:
        remembered = fingerprint_weights(model)
        write_atomically(memo, remembered.encode())
    return _joined(remembered, model)


def fingerprint_weights(model: Any) -> str:
    """Hash every parameter and buffer that is saved with a model and takes part in its forward; as above."""
    names = ForwardNames(model)
    digest = ContentHash()
    # Where a layer's adapters are off, the layer below it has its name, and comes after it.
    shown = {short: (name, module) for name, module in model.named_modules() if (short := names(name)) is not None}
    for short, (name, module) in sorted(shown.items()):
        for key, value in sorted(_saved(module), key=lambda pair: pair[0]):
            if names(f"{name}.{key}") is not None:
                digest.add((short, key))
                digest.add(value)
    return digest.hexdigest()


def _saved(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a module itself, without its parts, adds to a state dict."""
    parameters = {key: value for key, value in module._parameters.items() if value is not None}
    if type(module)._save_to_state_dict is torch.nn.Module._save_to_state_dict or _has_states(parameters):
        yield from parameters.items()
        for key, value in module._buffers.items():
            if value is not None and key not in module._non_persistent_buffers_set:
                yield key, value
        # bitsandbytes keeps scales beside its weights. Asked for a state dict, it would convert 4-bit weights back
        # from what this processor computes with, and change them.
        for key, value in parameters.items():
            yield f"{key}.quant_state", getattr(value, "quant_state", None)
    else:
        saved: dict[str, Any] = {}
        module._save_to_state_dict(saved, "", False)
        yield from saved.items()


def _has_states(parameters: dict[str, Any]) -> bool:
    return any(getattr(value, "quant_state", None) is not None for value in parameters.values())


def _joined(weights: str, model: Any) -> str:
    return hash_of([weights, type(model).__name__, _settings(model), describe_structure(model)])


def _settings(model: Any) -> str:
    """Return what a model's configuration sets to other values than its class."""
    return json.dumps(_relevant(model.config.to_diff_dict()), sort_keys=True, default=repr)


def _relevant(settings: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: value for name, value in settings.items() if name not in IRRELEVANT_SETTINGS and "_attn_impl" not in name
    }
    return {name: _relevant(value) if isinstance(value, dict) else value for name, value in kept.items()}


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Hash a fast tokenizer's whole definition and its chat template.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerFast

    Returns
    -------
    str
        SHA-256, hexadecimal.
    """
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    digest.update(json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True).encode())
    return digest.hexdigest()
