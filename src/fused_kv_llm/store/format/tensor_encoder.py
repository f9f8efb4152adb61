"""From tensors and metadata to the bytes of a file; ``tensor_file`` reads them back.

The header is built here and not by the ``safetensors`` package for three reasons: the package copies all tensors once
more to serialise them, it does not promise the order of the metadata, and the header's own checksum has to stand at a
fixed place so that it can be verified before anything in the header is believed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from fused_kv_llm.store.format.cipher import Cipher
from fused_kv_llm.store.format.part import DTYPES, byte_view
from fused_kv_llm.store.format.tensor_file import HEADER_CHECKSUM, bound_metadata, header_checksum

__all__ = ["encode_header", "encode_tensors"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 64


def encode_tensors(
    public: Mapping[str, str],
    private: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    num_pieces: int | None,
    cipher: Cipher | None,
) -> list[memoryview]:
    """Lay out a file in memory, without copying tensors that are contiguous and on the CPU.

    Parameters
    ----------
    public : mapping of str to str
        Metadata that stays readable in an encrypted file.
    private : mapping
        Metadata, plain JSON values.
    tensors : mapping of str to torch.Tensor
        The tensors, in file order.
    num_pieces : int or None
        Pieces of every tensor, which divide its bytes evenly; None makes each tensor one piece.
    cipher : Cipher or None
        Encrypts the tensors and the private metadata.

    Returns
    -------
    list of memoryview
        The parts of the file, in order.
    """
    sealer = cipher.new_file() if cipher is not None else None
    described: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    data: list[memoryview] = []
    offset = message = 0
    for name, tensor in tensors.items():
        flat = byte_view(tensor.detach().to("cpu").contiguous())
        pieces = _cut(flat, num_pieces or 1)
        stored = [memoryview(sealer.seal(message + i, piece)) for i, piece in enumerate(pieces)] if sealer else [flat]
        digests = [""] * len(pieces) if sealer else [xxhash.xxh3_64_hexdigest(piece) for piece in pieces]
        message += len(pieces)
        nbytes = sum(len(part) for part in stored)
        shape = list(tensor.shape)
        described[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "xxh3_64": digests}
        place = {"data_offsets": [offset, offset + nbytes]}
        dtype, visible = ("U8", [nbytes]) if sealer else (_NAMES[tensor.dtype], shape)
        shown[str(len(shown)) if sealer else name] = {"dtype": dtype, "shape": visible, **place}
        data += stored
        offset += nbytes
    secret = json.dumps({"about": dict(private), "tensors": described}, ensure_ascii=False, separators=(",", ":"))
    metadata = dict(public)
    if sealer is None:
        metadata["private"] = secret
    else:
        metadata |= {"cipher": sealer.label, "sealed": sealer.seal_text(secret, bound_metadata(public))}
    return [memoryview(encode_header(metadata, shown)), *data]


def encode_header(metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> bytes:
    """Return the beginning of a file: the header's length, and the header with its checksum."""
    header = {"__metadata__": {"header_xxh3_64": "0" * 16, **metadata}, **tensors}
    raw = bytearray(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode())
    raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
    raw[HEADER_CHECKSUM] = header_checksum(raw)
    return len(raw).to_bytes(8, "little") + raw


def _cut(data: memoryview, count: int) -> list[memoryview]:
    size = len(data) // count
    return [data[i * size : (i + 1) * size] for i in range(count)]
