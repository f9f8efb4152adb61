"""What the files of a store contain: tensors, headers, checksums, encryption."""

from __future__ import annotations

from fused_kv_llm.store.format.cipher import KEY_VARIABLE, Cipher, open_cipher
from fused_kv_llm.store.format.codec import FileCodec
from fused_kv_llm.store.format.header import ChunkHeader, FileHeader
from fused_kv_llm.store.format.names import check_key, check_name, file_name, parse_name
from fused_kv_llm.store.format.part import Part, byte_view
from fused_kv_llm.store.format.quantize import (
    STORAGE_DTYPES,
    check_kv_dtype,
    compress,
    expand,
    from_int4,
    from_int8,
    stored_bytes_per_token,
    to_int4,
    to_int8,
)
from fused_kv_llm.store.format.tensor_file import CHECKSUM_NBYTES

__all__ = [
    "CHECKSUM_NBYTES",
    "KEY_VARIABLE",
    "STORAGE_DTYPES",
    "ChunkHeader",
    "Cipher",
    "FileCodec",
    "FileHeader",
    "Part",
    "byte_view",
    "check_key",
    "check_kv_dtype",
    "check_name",
    "compress",
    "expand",
    "file_name",
    "from_int4",
    "from_int8",
    "open_cipher",
    "parse_name",
    "stored_bytes_per_token",
    "to_int4",
    "to_int8",
]
