"""From a chunk's KV to the bytes of its file; ``header`` reads them back."""

from __future__ import annotations

import sys

from fused_kv_llm.chunk import FORMAT_VERSION, ChunkKV, ContentHash
from fused_kv_llm.errors import ConfigError, StoreUnavailableError
from fused_kv_llm.store.format.cipher import Cipher
from fused_kv_llm.store.format.header import COMPUTE_DTYPES, FORMAT
from fused_kv_llm.store.format.quantize import compress
from fused_kv_llm.store.format.tensor_file import encode_tensors

__all__ = ["encode_chunk"]

_DTYPE_NAMES = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}


def encode_chunk(
    key: str,
    identity: str,
    text: str,
    content: ContentHash,
    kv: ChunkKV,
    kv_dtype: str = "auto",
    cipher: Cipher | None = None,
) -> list[memoryview]:
    """Lay out a chunk's file in memory, without copying tensors that are stored as they are and on the CPU.

    Parameters
    ----------
    key, identity, text : str
        The chunk's key, the digest of its identity, and its text.
    content : ContentHash
        Hashes of the text.
    kv : ChunkKV
        Keys and values, float32, float16 or bfloat16, on any device.
    kv_dtype : str
        Dtype to store them in; ``"auto"`` keeps theirs.
    cipher : Cipher or None
        Encrypts everything but key and identity.

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
    dtype = _DTYPE_NAMES[kv.keys.dtype]
    storage = dtype if kv_dtype == "auto" else kv_dtype
    tensors = compress(kv.keys.detach(), kv.values.detach(), storage)
    if storage == "float16" != dtype and not all(bool(t.isfinite().all()) for t in tensors.values()):
        raise ConfigError(f"The KV of chunk {key[:16]} exceeds the range of float16: set kv_dtype to bfloat16 or int8.")
    public = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "key": key, "identity": identity}
    private = {
        "text": text,
        "content": [content.prefix, content.full, content.length],
        "token_ids": [int(i) for i in kv.token_ids],
        "position": kv.position,
        "dtype": dtype,
        "storage": storage,
        "shape": list(kv.keys.shape),
    }
    return encode_tensors(public, private, tensors, kv.keys.shape[0], cipher)


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
