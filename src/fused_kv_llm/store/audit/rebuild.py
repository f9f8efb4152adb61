"""Moving a damaged index out of the way, so that a new one can be made from the files."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from fused_kv_llm.errors import StoreUnavailableError
from fused_kv_llm.store.folder import QUARANTINE

__all__ = ["rebuild_index"]


def rebuild_index(kv_dir: str | Path) -> Path | None:
    """Move an index that cannot be opened out of the way; ``KVStore(kv_dir).check(fix=True)`` then makes a new one.

    No process may have the store open. The new index needs the key that the files were written with.

    Parameters
    ----------
    kv_dir : str or Path

    Returns
    -------
    Path or None
        Where the old index is now; None if there was none.

    Raises
    ------
    StoreUnavailableError
        It cannot be moved.
    """
    root = Path(kv_dir).expanduser()
    index = root / "index.sqlite"
    if not index.exists():
        return None
    target = root / QUARANTINE / f"index.{time.time_ns()}.sqlite"
    try:
        target.parent.mkdir(mode=0o700, exist_ok=True)
        for suffix in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{index}{suffix}")
        os.replace(index, target)
    except OSError as error:
        raise StoreUnavailableError(f"The index {index} cannot be moved to {target}: {error}.") from error
    return target
