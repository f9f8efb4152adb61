"""What the files of a store contain: tensors, headers, checksums, encryption."""

from __future__ import annotations

from fused_kv_llm.store.format.cipher import KEY_VARIABLE, Cipher, FileCipher, find_key
from fused_kv_llm.store.format.file_format import encode_chunk
from fused_kv_llm.store.format.header import ChunkHeader, read_header
from fused_kv_llm.store.format.names import check_key, check_name, parse_name
from fused_kv_llm.store.format.quantize import (
    STORAGE_DTYPES,
    check_kv_dtype,
    expand,
    expand_into,
    stored_bytes_per_token,
)
from fused_kv_llm.store.format.tensor_file import DTYPES, Part, TensorFile, byte_view, encode_tensors, read_tensor_file

__all__ = [
    "DTYPES",
    "KEY_VARIABLE",
    "STORAGE_DTYPES",
    "ChunkHeader",
    "Cipher",
    "FileCipher",
    "Part",
    "TensorFile",
    "byte_view",
    "check_key",
    "check_kv_dtype",
    "check_name",
    "encode_chunk",
    "encode_tensors",
    "expand",
    "expand_into",
    "find_key",
    "parse_name",
    "read_header",
    "read_tensor_file",
    "stored_bytes_per_token",
]
