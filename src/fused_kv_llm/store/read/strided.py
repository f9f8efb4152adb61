"""Where the bytes of a stored layer belong in memory: a tensor whose rows lie apart, such as a request's cache.

Reading a chunk that the system has in its cache takes about half a millisecond, and every call of torch in between ten
microseconds: so memory is addressed directly, and what depends on the shapes only is worked out once.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Segments", "layer_segments"]


class Segments(NamedTuple):
    """Stretches of memory that take pieces of a file, so many each.

    Parameters
    ----------
    owner : object
        What keeps the memory alive.
    address : int
        Where the first begins.
    pieces, each : int
        How many pieces there are, and how many stretches take one.
    piece_step, step : int
        Bytes from a piece to the next, and from a stretch to the next.
    nbytes : int
        Bytes of a stretch.
    before, after : int
        Bytes in the file before and after those of each stretch that go nowhere.
    """

    owner: Any
    address: int
    pieces: int
    each: int
    piece_step: int
    step: int
    nbytes: int
    before: int = 0
    after: int = 0

    @staticmethod
    def of(memory: memoryview, nbytes: int) -> Segments:
        """Cut memory that is contiguous and can be written into pieces of so many bytes."""
        count = len(memory) // nbytes if nbytes else 0
        address = np.frombuffer(memory, np.uint8).ctypes.data if count else 0
        return Segments(memory, address, count, 1, nbytes, 0, nbytes)

    @property
    def views_each(self) -> int:
        """How many views take a piece."""
        return self.each * (1 + bool(self.before) + bool(self.after))

    def views(self, first: int, last: int) -> list[memoryview]:
        """Return the memory of pieces ``first`` to ``last - 1``, in the order of the bytes, valid as long as this is.

        What goes nowhere has memory of its own here, because it is hashed too.
        """
        found = []
        waste = memoryview(bytearray((last - first) * self.each * (self.before + self.after)))
        for piece in range(first, last):
            for stretch in range(self.each):
                address = self.address + piece * self.piece_step + stretch * self.step
                wanted = memoryview(_bytes_type(self.nbytes).from_address(address))
                gaps = waste[: self.before], waste[self.before : self.before + self.after]
                waste = waste[self.before + self.after :]
                found += [view for view in (gaps[0], wanted, gaps[1]) if len(view)]
        return found


def layer_segments(target: torch.Tensor, shape: tuple[int, int, int, int], wanted: range) -> Segments | None:
    """Return the memory that takes the bytes of stored layers.

    Parameters
    ----------
    target : torch.Tensor
        ``[layers, kv_heads, tokens, head_dim]``, any strides of layers and heads.
    shape : tuple of int
        Layers, heads, tokens and dimensions that are stored.
    wanted : range
        Which of the stored tokens the target has a place for; the others go to memory that is thrown away.

    Returns
    -------
    Segments or None
        The memory, a layer a piece. None if that cannot be done, or would throw away more than it keeps: the target is
        not in the computer's own memory, a head's tokens lie apart, or the shapes differ.
    """
    tokens = len(wanted)
    if target.shape != (*shape[:2], tokens, shape[3]) or wanted.step != 1 or not target.is_cpu:
        return None
    rows = _rows(shape, target.stride(), wanted.start, tokens, target.element_size())
    return None if rows is None else Segments(target, target.data_ptr(), *rows)


@lru_cache(maxsize=256)
def _rows(
    shape: tuple[int, int, int, int], strides: tuple[int, ...], start: int, tokens: int, itemsize: int
) -> tuple[int, int, int, int, int, int, int] | None:
    """Return what ``Segments`` says besides owner and address; None if the target cannot be read into.

    Requests ask for few different ones, and each of them often.
    """
    layers, heads, stored_tokens, dim = shape
    if min(layers, heads, tokens, dim) == 0 or strides[2:] != (dim, 1) or 2 * tokens <= stored_tokens:
        return None
    row_nbytes = dim * itemsize
    layer_step, head_step, nbytes = strides[0] * itemsize, strides[1] * itemsize, tokens * row_nbytes
    if tokens == stored_tokens and head_step == nbytes:
        return layers, 1, layer_step, 0, heads * nbytes, 0, 0
    after = (stored_tokens - start - tokens) * row_nbytes
    return layers, heads, layer_step, head_step, nbytes, start * row_nbytes, after


@lru_cache(maxsize=64)
def _bytes_type(count: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * count
