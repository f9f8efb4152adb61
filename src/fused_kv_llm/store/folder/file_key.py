"""Whether a store's files were written with the encryption key that was given.

A file of another key looks damaged. The index knows the right key; where the index was lost, only the files can tell.
Without this check a wrong key would get an index of its own, and mending would throw every file out.
"""

from __future__ import annotations

import os
from pathlib import Path

from fused_kv_llm.errors import ChunkDamagedError, ChunkKeyError, StoreUnavailableError
from fused_kv_llm.store.folder.layout import StoreFolder
from fused_kv_llm.store.format import KEY_VARIABLE, FileCodec, open_cipher

__all__ = ["check_files_key", "check_folder_key"]


def check_files_key(folder: StoreFolder, codec: FileCodec) -> None:
    """Refuse a key that opens none of a store's files although another key may open some.

    Reads headers until one opens. One file that does not open proves nothing: its header may have been altered.

    Parameters
    ----------
    folder : StoreFolder
        The store's.
    codec : FileCodec
        Decodes files with the key that was given.

    Raises
    ------
    StoreUnavailableError
        It is not the files' key.
    """
    refused: list[ChunkKeyError] = []
    for file in folder.walk():
        if file.key is None:
            continue
        try:
            fd = folder.open_file(file.key, file.name)
        except (ChunkDamagedError, OSError):
            continue
        try:
            codec.read(fd, file.key, os.fstat(fd).st_size)
        except ChunkKeyError as error:
            refused.append(error)
        except (ChunkDamagedError, OSError):
            # A damaged file says nothing about the key.
            continue
        else:
            return
        finally:
            os.close(fd)
    if refused:
        raise StoreUnavailableError(_refusal(folder, codec, refused)) from refused[0]


def check_folder_key(kv_dir: str | Path, encryption_key: str | bytes | None = None) -> None:
    """Refuse a key as ``check_files_key`` does, for a store that cannot be opened because its index is damaged.

    Parameters
    ----------
    kv_dir : str or Path
        The store's folder.
    encryption_key : str, bytes or None
        As ``KVStore`` takes it.

    Raises
    ------
    StoreUnavailableError
        It is not the files' key, or the folder cannot be used.
    """
    codec = FileCodec(open_cipher(encryption_key))
    check_files_key(StoreFolder(Path(kv_dir).expanduser(), read_only=False), codec)


def _refusal(folder: StoreFolder, codec: FileCodec, refused: list[ChunkKeyError]) -> str:
    if not codec.is_encrypted:
        state, advice = "are encrypted", f"give their encryption_key, or set {KEY_VARIABLE}"
    elif all(error.plain for error in refused):
        state, advice = "are not encrypted", f"give no encryption_key, and unset {KEY_VARIABLE}"
    else:
        state = "were written with another key"
        advice = f"give the encryption_key that they were written with, or set {KEY_VARIABLE} to it"
    return (
        f"The files of the store in {folder.root} {state}: none can be opened as it was asked for, and "
        f"{len(refused):,} may be opened otherwise. Nothing was changed: {advice}, or set kv_dir to another folder."
    )
