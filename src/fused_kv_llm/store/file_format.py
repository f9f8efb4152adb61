"""One chunk's KV as one safetensors file.

::

    u64 little endian   length of the header
    header              JSON, padded with spaces so that the data starts at a multiple of 64 bytes
    "k"                 [layers, kv_heads, tokens, head_dim], little endian, contiguous
    "v"                 the same

The file is an ordinary safetensors file, so any tool can look at it. The header is built here and not by
the ``safetensors`` package for three reasons: the package copies all tensors once more to serialise them,
it does not promise the order of the metadata, and the header's own checksum has to stand at a fixed place
so that it can be verified before anything in the header is believed.

Everything an index needs is in the metadata, so that an index can be rebuilt from the files alone. Each
layer of the keys and of the values has its own checksum, so that layers can be read and trusted singly.
"""

from __future__ import annotations

import json
import sys

import torch
import xxhash

from fused_kv_llm.chunk import FORMAT_VERSION, ChunkKV, ContentHash
from fused_kv_llm.errors import ConfigError, StoreUnavailableError
from fused_kv_llm.store.header import DTYPES, encode_header

__all__ = ["byte_view", "encode_chunk", "layer_checksums"]

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def layer_checksums(data: memoryview, num_layers: int) -> list[str]:
    """Return the xxh3-64 of each of ``num_layers`` equal parts of ``data``."""
    size = len(data) // num_layers
    return [xxhash.xxh3_64_hexdigest(data[i * size : (i + 1) * size]) for i in range(num_layers)]


def encode_chunk(key: str, identity: str, text: str, content: ContentHash, kv: ChunkKV) -> list[memoryview]:
    """Lay out a chunk's file in memory, without copying tensors that are contiguous and on the CPU.

    Parameters
    ----------
    key, identity, text : str
        The chunk's key, the digest of its identity, and its text.
    content : ContentHash
        Hashes of the text.
    kv : ChunkKV
        Keys and values, float32, float16 or bfloat16, on any device.

    Returns
    -------
    list of memoryview
        The parts of the file, in order.

    Raises
    ------
    ConfigError
        The text, hashes, keys, values, token ids or position cannot be stored or do not fit together.
    """
    _check_content(identity, text, content)
    _check_kv(kv)
    keys, values = (byte_view(t.detach().to("cpu").contiguous()) for t in (kv.keys, kv.values))
    layers = kv.keys.shape[0]
    metadata = {
        "format": "fused_kv_llm",
        "format_version": str(FORMAT_VERSION),
        "key": key,
        "identity": identity,
        "text": text,
        "content": json.dumps([content.prefix, content.full, content.length]),
        "token_ids": json.dumps([int(i) for i in kv.token_ids]),
        "position": json.dumps(kv.position),
        "k_xxh3_64": json.dumps(layer_checksums(keys, layers)),
        "v_xxh3_64": json.dumps(layer_checksums(values, layers)),
    }
    header = encode_header(metadata, _DTYPE_NAMES[kv.keys.dtype], list(kv.keys.shape), len(keys))
    return [memoryview(header), keys, values]


def _check_content(identity: str, text: str, content: ContentHash) -> None:
    if not isinstance(identity, str) or not isinstance(text, str):
        raise ConfigError(
            "identity (KVIdentity.digest) and text must be str, "
            f"not {type(identity).__name__} and {type(text).__name__}."
        )
    if not (0 <= content.prefix < 1 << 64 and 0 <= content.full < 1 << 64 and content.length >= 0):
        raise ConfigError(f"Content hashes are unsigned 64-bit numbers and a length, not {content}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"The chunk's text is not valid Unicode: {error}. Clean it first.") from error


def _check_kv(kv: ChunkKV) -> None:
    keys, values, ids = kv.keys, kv.values, kv.token_ids
    if keys.dim() != 4 or keys.shape != values.shape or keys.numel() == 0:
        raise ConfigError(
            "Keys and values must both be [layers, kv_heads, tokens, head_dim] and not empty, "
            f"not {list(keys.shape)} and {list(values.shape)}."
        )
    if keys.dtype not in _DTYPE_NAMES or keys.dtype != values.dtype:
        raise ConfigError(
            "Keys and values must share one dtype of float32, float16 and bfloat16, "
            f"not {keys.dtype} and {values.dtype}."
        )
    if len(ids) != keys.shape[2]:
        raise ConfigError(f"{len(ids)} token ids were given for a KV of {keys.shape[2]} tokens.")
    if min(ids) < 0 or max(ids) >= 1 << 31:
        raise ConfigError(f"Token ids must be in [0, 2**31), not {min(ids)}..{max(ids)}.")
    if kv.position < 0:
        raise ConfigError(f"A chunk's position must be 0 or more, not {kv.position}.")
    if sys.byteorder != "little":
        raise StoreUnavailableError("Chunk KV are stored little endian; a big-endian machine cannot use them.")
