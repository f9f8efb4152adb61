"""Pieces that the system has in its cache, read and verified by native code: Python would take as long again."""

from __future__ import annotations

import ctypes
import functools
import struct
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from fused_kv_kernels import (
    MOST_SEGMENTS,
    SHORTEST_NBYTES,
    STRIPE_NBYTES,
    native_piece_reader,
)
from fused_kv_llm.errors import FusedKVWarning
from fused_kv_llm.store.read.destination import Destination

__all__ = ["Outcome", "read_natively"]

# What is read and hashed at once stays in a core's second cache.
_TOGETHER_NBYTES = 1 << 19
_LEFT, _DAMAGED = 0, 2
_DIGEST_NBYTES = 8


class Outcome(NamedTuple):
    """What has become of pieces.

    Parameters
    ----------
    left : list of (int, int, int)
        Runs that the system did not have: the number of their destination, and the first and last-plus-one of its
        pieces, counted from its own first.
    damaged : list of (str, int)
        Pieces whose checksums do not match, by their tensors' names.
    """

    left: list[tuple[int, int, int]]
    damaged: list[tuple[str, int]]


def read_natively(fd: int, wanted: Sequence[Destination], *, shared: bool) -> Outcome | None:
    """Read pieces that the system has in its cache.

    Parameters
    ----------
    fd : int
        The file, which is not encrypted.
    wanted : sequence of Destination
        The pieces; not empty.
    shared : bool
        Whether a second thread helps, if it is not helping somebody else and there is a core for it.

    Returns
    -------
    Outcome or None
        None if these have to be read in another way, and nothing was read.
    """
    library = _library()
    if library is None:
        return None
    numbers: list[int] = []
    count = 0
    for place in wanted:
        described = _described(place)
        if described is None:
            return None
        numbers += described
        count += place.segments.pieces
    states = bytearray(count)
    places = struct.pack(f"={len(numbers)}q", *numbers)
    shown = (ctypes.c_char * count).from_buffer(states)
    told = library.fkv_read_pieces(fd, _TOGETHER_NBYTES, len(wanted), places, shown, shared)
    return _outcome(wanted, states) if told else Outcome([], [])


def _described(place: Destination) -> tuple[int, ...] | None:
    """Return what native code needs to know, in its order; None if it cannot read or hash these pieces."""
    part, segments = place.part, place.segments
    _, address, pieces, each, piece_step, step, nbytes, before, after = segments
    size = each * (before + nbytes + after)
    if (nbytes | before | after) % STRIPE_NBYTES or not SHORTEST_NBYTES <= size == part.piece_nbytes:
        return None
    digests = part.digests.address
    if digests is None or segments.views_each > MOST_SEGMENTS:
        return None
    first = digests + place.start * _DIGEST_NBYTES
    return address, piece_step, step, each, nbytes, before, after, part.start + place.start * size, pieces, first


def _outcome(wanted: Sequence[Destination], states: bytearray) -> Outcome:
    outcome = Outcome([], [])
    begin = 0
    for number, place in enumerate(wanted):
        own = np.frombuffer(states[begin : begin + place.segments.pieces], np.uint8)
        begin += len(own)
        outcome.damaged.extend((place.part.name, place.start + int(i)) for i in np.flatnonzero(own == _DAMAGED))
        edges = np.flatnonzero(np.diff(np.concatenate([[False], own == _LEFT, [False]]).astype(np.int8)))
        outcome.left.extend((number, int(first), int(last)) for first, last in edges.reshape(-1, 2))
    return outcome


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    library = native_piece_reader()
    return library if library is not None and _agrees(library) else None


def _agrees(library: ctypes.CDLL) -> bool:
    """Hash a little of everything: which instructions a processor really has shows in use only."""
    data = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
    for lengths in ([256], [1024], [64, 1024, 0, 64], [2048, 1088], [4096] * 16):
        places = data.ctypes.data + np.cumsum([0, *lengths[:-1]])
        segments = np.stack([places, lengths], axis=1)
        found = library.fkv_xxh3_64(segments.ctypes.data, len(lengths))
        if found != xxhash.xxh3_64_intdigest(data[: sum(lengths)].tobytes()):
            warnings.warn(
                "The native reader of files computes other checksums than xxhash here, and is not used: loading from "
                "the system's cache takes up to twice as long. Report your processor; FUSED_KV_KERNELS=torch is "
                "content without.",
                FusedKVWarning,
                stacklevel=2,
            )
            return False
    return True
