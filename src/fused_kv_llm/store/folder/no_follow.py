"""Folders of a store, opened one below the other: no link on the way is followed, whenever somebody planted it.

What is written, moved or deleted goes by the descriptor of its folder and not by a path, since a path may lead
elsewhere a moment after it was looked at.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fused_kv_llm.errors import StoreUnavailableError

__all__ = ["beneath", "refuse_link"]

_ROOT_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FLAGS = _ROOT_FLAGS | os.O_NOFOLLOW


@contextmanager
def beneath(root: str | os.PathLike[str], *names: str, make: bool = False) -> Iterator[int]:
    """Open a folder, and give its descriptor.

    Parameters
    ----------
    root : str or PathLike
        A folder, or a link to one.
    names : str
        The folders that lead from there to the one wanted, each in the one before.
    make : bool
        Make those that are not there, durably, for this user only.

    Yields
    ------
    int
        The descriptor, open for listing and ``fsync``.

    Raises
    ------
    StoreUnavailableError
        One of the names is a link, or no folder.
    FileNotFoundError
        There is none.
    OSError
        It cannot be opened or made.
    """
    fd = os.open(root, _ROOT_FLAGS)
    try:
        for depth, name in enumerate(names, 1):
            if make:
                _make(fd, name)
            try:
                deeper = os.open(name, _FLAGS, dir_fd=fd)
            except OSError as error:
                _explain(error, os.path.join(root, *names[:depth]))
                raise
            os.close(fd)
            fd = deeper
        yield fd
    finally:
        os.close(fd)


def refuse_link(path: str) -> None:
    """Raise ``StoreUnavailableError`` if `path` is a symbolic link."""
    if os.path.islink(path):
        raise StoreUnavailableError(
            f"{path} is a symbolic link, and a store follows none out of its folder. Delete the link, and move what "
            "it leads to there if it is the store's; kv_dir itself may be a link."
        )


def _explain(error: OSError, path: str) -> None:
    # The name alone would not say which folder it was.
    error.filename = path
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        refuse_link(path)
        raise StoreUnavailableError(f"{path} is not a folder, which a store has there. Move it away.") from error


def _make(fd: int, name: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=fd)
        os.fsync(fd)
