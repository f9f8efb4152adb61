"""Opening the folders of a store without following symbolic links.

Files are written, moved and deleted relative to the descriptor of their folder and not by their path: a path may lead
somewhere else a moment after it was checked.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fused_kv_llm.errors import StoreUnavailableError

__all__ = ["open_beneath", "refuse_link"]

_ROOT_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FLAGS = _ROOT_FLAGS | os.O_NOFOLLOW


@contextmanager
def open_beneath(root: str | os.PathLike[str], *names: str, make: bool = False) -> Iterator[int]:
    """Open a folder below `root` and give its descriptor.

    Parameters
    ----------
    root : str or PathLike
        A folder, or a link to one.
    names : str
        The folders on the path from there, each inside the one before.
    make : bool
        Create missing folders, durably and with mode 0700.

    Yields
    ------
    int
        The descriptor, open for listing and ``fsync``.

    Raises
    ------
    StoreUnavailableError
        One of the names is a link, or not a folder.
    FileNotFoundError
        There is no such folder.
    OSError
        It cannot be opened or created.
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
            f"{path} is a symbolic link, and a store follows no link out of its folder. Delete the link; if what it "
            "leads to is the store's, move that to its place. kv_dir itself may be a link."
        )


def _explain(error: OSError, path: str) -> None:
    # The error names only the last part of the path.
    error.filename = path
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        refuse_link(path)
        raise StoreUnavailableError(f"{path} is not a folder, but a store needs one there. Move it away.") from error


def _make(fd: int, name: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=fd)
        os.fsync(fd)
