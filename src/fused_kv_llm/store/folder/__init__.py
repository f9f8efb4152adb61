"""The folder of a store: where its files are, and how they are written, moved and deleted safely."""

from __future__ import annotations

from fused_kv_llm.store.folder.disk import free_bytes
from fused_kv_llm.store.folder.file_key import check_files_key, check_folder_key
from fused_kv_llm.store.folder.file_version import FileVersion, file_version
from fused_kv_llm.store.folder.layout import StoreFolder
from fused_kv_llm.store.folder.no_follow import refuse_link
from fused_kv_llm.store.folder.quarantine import QUARANTINE
from fused_kv_llm.store.folder.read_only import connect_read_only
from fused_kv_llm.store.folder.staging import STAGING

__all__ = [
    "QUARANTINE",
    "STAGING",
    "FileVersion",
    "StoreFolder",
    "check_files_key",
    "check_folder_key",
    "connect_read_only",
    "file_version",
    "free_bytes",
    "refuse_link",
]
