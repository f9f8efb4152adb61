"""Where the bytes of a stored layer belong in a tensor whose rows lie apart, such as a request's cache."""

from __future__ import annotations

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
        ``[layers, kv_heads, tokens, head_dim]``, any strides of layers and heads.
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
    layers, heads, stored_tokens, dim = shape
    tokens = len(wanted)
    fits = tuple(target.shape) == (layers, heads, tokens, dim) and wanted.step == 1 and 2 * tokens > stored_tokens
    if not fits or target.device.type != "cpu" or target.numel() == 0 or target.stride()[2:] != (dim, 1):
        return None
    flat = _memory_of(target)
    row_nbytes = dim * target.element_size()
    layer_step, head_step = (step * target.element_size() for step in target.stride()[:2])
    begins = _begins(layers, layer_step, heads, head_step)
    nbytes, wasted = tokens * row_nbytes, (stored_tokens - tokens) * row_nbytes
    if not wasted and head_step == nbytes:
        return [flat[begin : begin + heads * nbytes] for begin in begins[::heads]], 1
    found = [flat[begin : begin + nbytes] for begin in begins]
    if not wasted:
        return found, heads
    waste = memoryview(bytearray(len(found) * wasted))
    gaps = [waste[begin : begin + wasted] for begin in range(0, len(waste), wasted)]
    before = wanted.start * row_nbytes
    mixed = [part for kept, gap in zip(found, gaps, strict=True) for part in (gap[:before], kept, gap[before:])]
    return mixed, 3 * heads


@lru_cache(maxsize=64)
def _begins(layers: int, layer_step: int, heads: int, head_step: int) -> list[int]:
    """Return the offset of every head of every layer; requests ask for few different ones, and each of them often."""
    return [layer * layer_step + head * head_step for layer in range(layers) for head in range(heads)]


def _memory_of(target: torch.Tensor) -> memoryview:
    """Return the memory from a tensor's first byte to its last, whatever lies between them."""
    span = 1 + sum((size - 1) * step for size, step in zip(target.shape, target.stride(), strict=True))
    whole = target.as_strided((span,), (1,), target.storage_offset())
    return whole.view(torch.uint8).numpy().data
