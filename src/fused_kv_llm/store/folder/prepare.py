"""Making a store's folder, or refusing one that cannot be used."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fused_kv_llm.errors import StoreUnavailableError
from fused_kv_llm.store.folder.no_follow import refuse_link
from fused_kv_llm.store.folder.quarantine import QUARANTINE
from fused_kv_llm.store.folder.staging import STAGING

__all__ = ["CHUNKS", "INDEX", "prepare_folder"]

CHUNKS = "chunks"
INDEX = "index.sqlite"
# These must not be links: the store would delete, move or write whatever a planted link leads to.
_OWN = (CHUNKS, STAGING, QUARANTINE, INDEX, f"{INDEX}-wal", f"{INDEX}-shm")


def prepare_folder(root: Path, *, read_only: bool) -> None:
    """Create a store's folder and its subfolders, with mode 0700, and check that they can be used.

    Parameters
    ----------
    root : Path
        ``kv_dir``.
    read_only : bool
        Create nothing.

    Raises
    ------
    StoreUnavailableError
        The folder does not exist (``read_only``), cannot be created or cannot be written, or something in it, though
        not the folder itself, is a symbolic link.
    """
    _refuse_links(root)
    if read_only:
        if not (root / INDEX).is_file():
            raise StoreUnavailableError(
                f"There is no chunk-KV store in {root} to open read-only. Check kv_dir, or open it without read_only "
                "to create one."
            )
        return
    folders = [os.path.join(root, name) for name in (CHUNKS, STAGING, QUARANTINE)]
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in folders:
            os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreUnavailableError(
            f"The chunk-KV store in {root} cannot be created: {error}. Set kv_dir to a folder that you may write."
        ) from error
    for folder in (str(root), *folders):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise StoreUnavailableError(
                f"The folder {folder} cannot be written. Set kv_dir to a folder that you may write, or open the store "
                "with read_only=True."
            )


def _refuse_links(root: Path) -> None:
    for name in _OWN:
        refuse_link(os.path.join(root, name))
    # A folder that cannot be listed is reported when it is used.
    with suppress(OSError), os.scandir(root / CHUNKS) as shards:
        for shard in shards:
            refuse_link(shard.path)
