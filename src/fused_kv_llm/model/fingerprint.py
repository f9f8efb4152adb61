"""Content fingerprints of weights and tokenizers.

A name is not an identity: the same hub id can carry other weights tomorrow. The weights themselves are hashed, with
the settings that decide what a forward does with them; for models read from files the result is remembered beside
the files' sizes and times.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import xxhash

from fused_kv_llm.paths import cache_folder, write_atomically

__all__ = ["fingerprint_files", "fingerprint_tokenizer", "fingerprint_weights"]


_FORWARD_SETTINGS = (
    "model_type",
    "hidden_act",
    "rms_norm_eps",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "partial_rotary_factor",
)


def _forward_settings(model: Any) -> str:
    config = getattr(model, "config", None)
    return json.dumps({name: repr(getattr(config, name, None)) for name in _FORWARD_SETTINGS})


def fingerprint_weights(model: Any) -> str:
    """Hash every parameter and buffer that is saved with the model, and the settings that a forward depends on.

    Parameters
    ----------
    model : torch.nn.Module

    Returns
    -------
    str
        128-bit xxh3, hexadecimal.
    """
    digest = xxhash.xxh3_128()
    digest.update(type(model).__name__.encode())
    digest.update(_forward_settings(model).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        digest.update(f"{name}|{flat.dtype}|{tuple(tensor.shape)}".encode())
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return str(digest.hexdigest())


def fingerprint_files(model: Any, folder: Path | None) -> str:
    """Return :func:`fingerprint_weights`, remembered for models whose files have not changed.

    Parameters
    ----------
    model : torch.nn.Module
        The loaded model.
    folder : Path or None
        Where its weight files are; None for a model that was given as an object.

    Returns
    -------
    str
    """
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")) if folder is not None else []
    if not files:
        return fingerprint_weights(model)
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    described = json.dumps([type(model).__name__, str(model.dtype), _forward_settings(model), stats])
    memo = cache_folder() / "fingerprints" / hashlib.sha256(described.encode()).hexdigest()
    if memo.exists():
        remembered = memo.read_text().strip()
        if len(remembered) == 32:
            return remembered
    fingerprint = fingerprint_weights(model)
    write_atomically(memo, fingerprint.encode())
    return fingerprint


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
