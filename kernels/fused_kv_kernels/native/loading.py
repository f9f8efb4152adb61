"""Opening a native library: the one that came with the wheel if this processor runs it, else one compiled here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from .build import build
from .processor import LEVELS, processor_features

__all__ = ["PREBUILT", "opened_library", "prebuilt_library"]

PREBUILT = Path(__file__).parent / "prebuilt"
"""Where a wheel with native libraries has them, as ``<folder of sources>-<level>.so``; absent in a checkout."""


def prebuilt_library(folder: str) -> Path | None:
    """Return the wheel's library of a folder of sources for the best level that this processor has, or None."""
    candidates = (
        PREBUILT / f"{folder}-{level.name}.so" for level in LEVELS[folder] if level.features <= processor_features()
    )
    return next(filter(Path.exists, candidates), None)


def opened_library(folder: str, declare: Callable[[ctypes.CDLL], ctypes.CDLL], *extra_flags: str) -> ctypes.CDLL:
    """Return the library of a folder of sources, ready to be called.

    Parameters
    ----------
    folder : str
        Name of a folder of sources beside this file.
    declare : callable
        Gives the library's functions their types; raises ``AttributeError`` where one is not there.
    *extra_flags : str
        For the compiler; with any, the library is compiled here.

    Raises
    ------
    OSError
        If there is no compiler, its output cannot be written, or it is no library.
    subprocess.SubprocessError
        If the compiler fails or takes too long.
    """
    prebuilt = None if extra_flags else prebuilt_library(folder)
    if prebuilt is not None:
        try:
            return declare(ctypes.CDLL(str(prebuilt)))
        except (OSError, AttributeError):
            # An older C library than the wheel's, or a damaged file: one that is compiled here fits.
            pass
    path = build(folder, *extra_flags)
    try:
        return declare(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):
        # No library, or another one, under this name: whatever happened to it, it is made again.
        path.unlink(missing_ok=True)
        return declare(ctypes.CDLL(str(build(folder, *extra_flags))))
