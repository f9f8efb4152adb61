"""Chunk views: a sequence's KV as shared chunks that nobody changes, and a cache of its own for what it computed.

The KV that a request attends to differs from what is stored of a chunk in three ways, and none needs a copy:

- Its keys are moved by the distance between where the chunk was prefilled and where it stands. Scores depend on
  differences of positions only, so the query can be moved back instead.
- A context shift is added to keys and values with a weight. Scores and outputs are linear in it.
- Deviation transfer adds one vector to a chunk's values in each layer and head, and one to its keys that is rotated to
  each token's position. What a query has with that depends on the token's position in the chunk alone.

Tokens that the request recomputed are hidden in the chunk and stand in its own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .rotate import RotationTable, rotation_table

__all__ = ["ChunkView", "LayerRotations", "SequenceView", "SharedChunk"]


@dataclass(frozen=True, slots=True, eq=False)
class SharedChunk:
    """A chunk's KV as it was prefilled, and its context shift; shared by all requests that see it.

    Parameters
    ----------
    keys, values : Tensor
        ``[L, Hkv, T, D]`` and ``[L, Hkv, T, Dv]``, rows one after another.
    shifts : tuple of (Tensor, Tensor) or None
        Of keys and of values: int8 ``[L, Hkv, T, D]`` and ``[L, Hkv, T, Dv]``, each with its scales, float32
        ``[L, Hkv, T, 1]``. The keys' shift has the rotation of the stored keys.

    Raises
    ------
    ValueError
        If the shapes or dtypes do not fit together.
    """

    keys: Tensor
    values: Tensor
    shifts: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        fits = self.keys.dim() == self.values.dim() == 4 and self.keys.shape[:3] == self.values.shape[:3]
        for part, shift in zip((self.keys, self.values), self.shifts or (), strict=False):
            whole, scale = shift
            fits = fits and whole.shape == part.shape and scale.shape == (*part.shape[:3], 1)
            fits = fits and (whole.dtype, scale.dtype) == (torch.int8, torch.float32)
        if not fits or self.keys.dtype != self.values.dtype:
            shapes = [[(x.dtype, list(x.shape)) for x in pair] for pair in self.shifts or ()]
            msg = (
                f"a chunk's keys {self.keys.dtype} {list(self.keys.shape)}, its values {self.values.dtype} "
                f"{list(self.values.shape)} and their shifts {shapes} do not fit together"
            )
            raise ValueError(msg)

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = [self.keys, self.values, *(x for pair in self.shifts or () for x in pair)]
        return sum(part.nbytes for part in parts)


class LayerRotations:
    """By what each layer rotates keys.

    Parameters
    ----------
    inv_freq : sequence of Tensor
        One for each layer, ``[rotary / 2]``; the same tensor where layers rotate alike.
    interleaved : bool
        The layout of the pairs.

    Attributes
    ----------
    kinds : list of Tensor
        The different ones.
    kind_of : list of int
        Which of them is each layer's.

    Raises
    ------
    ValueError
        If they do not rotate the same number of dimensions.
    """

    def __init__(self, inv_freq: Sequence[Tensor], interleaved: bool = False) -> None:
        self.kinds = list({id(one): one for one in inv_freq}.values())
        numbers = {id(one): number for number, one in enumerate(self.kinds)}
        self.kind_of = [numbers[id(one)] for one in inv_freq]
        self.interleaved = interleaved
        self._waves: dict[tuple[int, torch.dtype], Tensor] = {}
        if len({one.shape for one in self.kinds}) != 1:
            msg = f"layers must rotate the same number of dimensions (got {[list(one.shape) for one in self.kinds]})"
            raise ValueError(msg)

    @property
    def half(self) -> int:
        """Pairs of dimensions that are rotated."""
        return int(self.kinds[0].shape[0])

    def same_as(self, other: LayerRotations) -> bool:
        """Whether layers rotate alike, by both."""
        if self is other:
            return True
        alike = self.kind_of == other.kind_of and self.interleaved == other.interleaved
        return alike and all(map(torch.equal, self.kinds, other.kinds))

    def tables(self, positions: Tensor) -> list[RotationTable]:
        """Return a table of int64 positions for each kind of layer."""
        return [rotation_table(positions, one, self.interleaved) for one in self.kinds]

    def waves(self, num_tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Return ``[kinds, at least num_tokens, dim]``: cosines and sines of positions from 0 on, and ones behind them.

        The product of a query at position ``p`` and a vector that is rotated to ``p_0 + i`` is one of row ``i`` and
        what is the same for all ``i``. Made once for all sequences; longer ones are made when they are needed.
        """
        found = self._waves.get((dim, dtype))
        if found is None or found.shape[1] < num_tokens:
            tables = self.tables(torch.arange(max(256, 2 * num_tokens)))
            rest = torch.ones(len(tables[0]), dim - 2 * self.half)
            found = torch.stack([torch.cat((one.cos, one.sin, rest), dim=1) for one in tables]).to(dtype)
            self._waves[dim, dtype] = found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class ChunkView:
    """A shared chunk as one request sees it.

    Parameters
    ----------
    chunk : SharedChunk
    start : int
        Position in the request where the chunk's first token stands, or would stand if it is hidden.
    delta : int
        `start` less the position that its first key was rotated to when it was prefilled.
    weights : Tensor or None
        float32 ``[L, 2]``: with what weight the shift is added to keys and to values; zero without it.
    vectors : tuple of Tensor or None
        What deviation transfer adds: to keys, float32 ``[L, Hkv, D]``, before it is rotated to a token's position, and
        to values, float32 ``[L, Hkv, Dv]``.
    hidden : Tensor or None
        int64 ``[n]``, ascending: tokens of the chunk that the request does not see, as it has recomputed them.

    Raises
    ------
    ValueError
        If shapes or dtypes do not fit the chunk, there are weights but no shift, or a hidden token is not one of its
        tokens.
    """

    chunk: SharedChunk
    start: int
    delta: int
    weights: Tensor | None = None
    vectors: tuple[Tensor, Tensor] | None = None
    hidden: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        layers, heads, tokens, _ = self.chunk.keys.shape
        fits = self.weights is None or (self.weights.shape == (layers, 2) and self.chunk.shifts is not None)
        for part, vector in zip((self.chunk.keys, self.chunk.values), self.vectors or (), strict=False):
            fits = fits and vector.shape == (layers, heads, part.shape[3])
        floats = [x for x in (self.weights, *(self.vectors or ())) if x is not None]
        if not fits or {x.dtype for x in floats} - {torch.float32} or self.hidden.dtype != torch.int64:
            shapes = [None if x is None else list(x.shape) for x in (self.weights, *(self.vectors or ()))]
            msg = (
                f"weights and vectors {shapes}, float32, and hidden tokens, int64, do not fit a chunk of keys "
                f"{list(self.chunk.keys.shape)} {'without' if self.chunk.shifts is None else 'with'} a shift"
            )
            raise ValueError(msg)
        inside = self.hidden.numel() == 0 or (int(self.hidden.min()) >= 0 and int(self.hidden.max()) < tokens)
        if not inside or bool((self.hidden[1:] <= self.hidden[:-1]).any()):
            msg = f"hidden tokens {self.hidden.tolist()} must ascend and lie among the chunk's {tokens}"
            raise ValueError(msg)

    @property
    def nbytes(self) -> int:
        """Bytes of what is the request's own in it."""
        parts = [x for x in (self.weights, *(self.vectors or ()), self.hidden) if x is not None]
        return sum(part.nbytes for part in parts)


class SequenceView:
    """A sequence's KV: chunks it shares, and the cache of what it has computed itself.

    Parameters
    ----------
    chunks : sequence of ChunkView
    keys, values : Tensor
        ``[L, 1, Hkv, capacity, D]`` and ``[L, 1, Hkv, capacity, Dv]``: a cache with all tokens that no chunk shows, in
        any order. Keys are rotated to where they stand.
    rotations : LayerRotations

    Attributes
    ----------
    is_dense : bool
        Whether all that is read of the chunks lies row after row on the CPU.
    turns : Tensor
        float32 ``[chunks, kinds of layers, 4, rotary / 2]``: cosines and sines of each chunk's distance and start.

    Raises
    ------
    ValueError
        If a chunk does not fit the cache.
    """

    def __init__(self, chunks: Sequence[ChunkView], keys: Tensor, values: Tensor, rotations: LayerRotations) -> None:
        self.chunks, self.keys, self.values, self.rotations = list(chunks), keys, values, rotations
        for view in self.chunks:
            _check_chunk(view.chunk, keys, values)
        self.is_dense = all(_is_dense(view) for view in self.chunks)
        angles = [rotations.tables(torch.tensor([view.delta, view.start])) for view in self.chunks]
        turns = [torch.stack([torch.stack((one.cos, one.sin), dim=1) for one in kinds]) for kinds in angles]
        shape = (len(self.chunks), len(rotations.kinds), 4, rotations.half)
        self.turns = torch.stack(turns).view(shape) if turns else torch.empty(shape)

    @property
    def own_nbytes(self) -> int:
        """Bytes of what is not shared."""
        return self.keys.nbytes + self.values.nbytes + self.turns.nbytes + sum(view.nbytes for view in self.chunks)


def _is_dense(view: ChunkView) -> bool:
    chunk = view.chunk
    rows = all(x.stride(3) == 1 and x.stride(2) == x.shape[3] and x.is_cpu for x in (chunk.keys, chunk.values))
    rest = [x for pair in chunk.shifts or () for x in pair] + [view.hidden, *(view.vectors or ())]
    rest += [] if view.weights is None else [view.weights]
    return rows and all(x.is_contiguous() and x.is_cpu for x in rest)


def _check_chunk(chunk: SharedChunk, keys: Tensor, values: Tensor) -> None:
    for part, own in ((chunk.keys, keys), (chunk.values, values)):
        outer = own.shape[0], own.shape[2], own.shape[4]
        if (part.shape[0], part.shape[1], part.shape[3]) != outer or (part.dtype, part.device) != (
            own.dtype,
            own.device,
        ):
            msg = (
                f"a chunk of {part.dtype} {list(part.shape)} on {part.device} does not fit a cache of {own.dtype} "
                f"{list(own.shape)} on {own.device}"
            )
            raise ValueError(msg)
