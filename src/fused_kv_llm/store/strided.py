"""Where the bytes of a stored layer belong in a tensor whose rows lie apart, such as a request's cache.

Reading a chunk that the system has in its cache takes about half a millisecond, and every call of torch in between ten
microseconds: so memory is addressed directly, and what depends on the shapes only is worked out once.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

__all__ = ["layer_segments"]


def layer_segments(
    target: torch.Tensor, shape: tuple[int, int, int, int], wanted: range
) -> tuple[list[memoryview], int] | None:
    """Return the memory that takes the bytes of stored layers.

    Parameters
    ----------
    target : torch.Tensor
        ``[layers, kv_heads, tokens, head_dim]``, any strides of layers and heads. The memory is its own: it has to
        outlive what is returned.
    shape : tuple of int
        Layers, heads, tokens and dimensions that are stored.
    wanted : range
        Which of the stored tokens the target has a place for; the others go to memory that is thrown away.

    Returns
    -------
    list of memoryview, int; or None
        The memory in the order of the bytes, and how many segments take one layer. None if that cannot be done, or
        would throw away more than it keeps: the target is not in the computer's own memory, a head's tokens lie
        apart, or the shapes differ.
    """
    strides, tokens = target.stride(), len(wanted)
    if tuple(target.shape) != (*shape[:2], tokens, shape[3]) or wanted.step != 1 or not target.is_cpu:
        return None
    runs = _runs(shape, strides, tokens, target.element_size())
    if runs is None:
        return None
    span, slices, each = runs
    flat = memoryview(_bytes_type(span).from_address(target.data_ptr()))
    found = [flat[run] for run in slices]
    if tokens == shape[2]:
        return found, each
    row_nbytes = shape[3] * target.element_size()
    wasted, before = (shape[2] - tokens) * row_nbytes, wanted.start * row_nbytes
    waste = memoryview(bytearray(len(found) * wasted))
    gaps = [waste[begin : begin + wasted] for begin in range(0, len(waste), wasted)]
    mixed = [part for kept, gap in zip(found, gaps, strict=True) for part in (gap[:before], kept, gap[before:])]
    return mixed, 3 * each


@lru_cache(maxsize=64)
def _runs(
    shape: tuple[int, int, int, int], strides: tuple[int, ...], tokens: int, itemsize: int
) -> tuple[int, list[slice], int] | None:
    """Return the bytes from a target's first to its last, its contiguous runs, and how many of them a layer has.

    Requests ask for few different ones, and each of them often. None if the target cannot be read into.
    """
    layers, heads, stored_tokens, dim = shape
    if min(layers, heads, tokens, dim) == 0 or strides[2:] != (dim, 1) or 2 * tokens <= stored_tokens:
        return None
    layer_step, head_step, nbytes = strides[0] * itemsize, strides[1] * itemsize, tokens * dim * itemsize
    each = heads
    if tokens == stored_tokens and head_step == nbytes:
        each, nbytes = 1, heads * nbytes
    begins = [layer * layer_step + head * head_step for layer in range(layers) for head in range(each)]
    return max(begins) + nbytes, [slice(begin, begin + nbytes) for begin in begins], each


@lru_cache(maxsize=64)
def _bytes_type(count: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * count
