"""The native reader of pieces of files, which hashes what it reads while the processor still has it.

It needs Linux, and a compiler where the wheel brought no library that runs here; any processor will do. Whoever uses
it has a slower way to do the same.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import sys
import warnings

from .loading import opened_library

__all__ = ["MOST_SEGMENTS", "SHORTEST_NBYTES", "STRIPE_NBYTES", "native_piece_reader"]

STRIPE_NBYTES = 64
"""What is hashed has segments of multiples of this."""
SHORTEST_NBYTES = 256
"""Fewest bytes of a piece that is hashed."""
MOST_SEGMENTS = 1024
"""Most segments of a piece; see ``reading/read_pieces.cpp`` for what is a segment."""

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


@functools.lru_cache(maxsize=1)
def native_piece_reader() -> ctypes.CDLL | None:
    """Return the functions of ``reading/read_pieces.cpp``, or None where they cannot run.

    Built if need be, which takes seconds, once. ``FUSED_KV_KERNELS=torch``, when this is called first, turns them
    off. A compiler that fails is reported with a warning; one that is missing is reported by the operators.
    """
    if os.environ.get("FUSED_KV_KERNELS") == "torch":
        return None
    if platform.system() != "Linux" or sys.byteorder != "little":
        return None
    try:
        return opened_library("reading", _declared)
    except FileNotFoundError:
        return None
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or ""
        warnings.warn(
            f"The native reader of files could not be built: {error} {output.strip()[:500]}\nPython does its work, up "
            "to twice as slow for files that are cached. Install a C++ compiler (Debian: g++), or set "
            "FUSED_KV_KERNELS=torch.",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.fkv_read_pieces.argtypes = [ctypes.c_int, _NUMBER, _NUMBER, _POINTER, _POINTER, ctypes.c_int]
    library.fkv_xxh3_64.argtypes = [_POINTER, _NUMBER]
    library.fkv_xxh3_64.restype = ctypes.c_uint64
    return library
