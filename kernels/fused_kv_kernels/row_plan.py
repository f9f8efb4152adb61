"""The rows of a forward pass: where they stand, which keys they see, and what all layers share of that."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .scoring import check_first_keys

__all__ = ["RowPlan"]

BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows ``[start, stop)`` see no keys outside ``[begin, end)``, and all of those in ``[full, diagonal)``."""

    start: int
    stop: int
    begin: int
    full: int
    diagonal: int
    end: int

    @property
    def hidden(self) -> list[slice]:
        """The stretches of keys of which some rows do not see all."""
        if self.full >= self.diagonal:
            return [slice(self.begin, self.end)]
        stretches = slice(self.begin, self.full), slice(self.diagonal, self.end)
        return [stretch for stretch in stretches if stretch.start < stretch.stop]


class RowPlan:
    """Blocks of query rows, shared by all layers of one forward pass that see the same keys.

    Parameters
    ----------
    q_positions : Tensor
        int64 ``[R]``, strictly ascending, each in ``[0, num_keys)``.
    num_keys : int
        Keys ``N`` the rows may see.
    block_rows : int
        Rows per block. Fewer rows make the products thin, more rows read more keys that the mask then hides;
        64 to 128 measured alike on CPUs.
    first_keys : Tensor or None
        int64 ``[R]``, not descending: row ``i`` sees keys ``first_keys[i] .. q_positions[i]``, both included. None:
        from the first key on.

    Attributes
    ----------
    first_keys : Tensor or None
        None also if no window hides a key.

    Raises
    ------
    ValueError
        If the positions are not strictly ascending or lie outside the keys, or a window does not begin among its row's
        keys or begins before that of the row before.
    """

    def __init__(
        self,
        q_positions: Tensor,
        num_keys: int,
        block_rows: int = BLOCK_ROWS,
        first_keys: Tensor | None = None,
    ) -> None:
        # Kernels step through them one by one.
        self.q_positions = q_positions.contiguous()
        self.num_keys = num_keys
        positions = q_positions.tolist()
        if positions and (positions[0] < 0 or positions[-1] >= num_keys):
            msg = f"query positions {positions[0]}..{positions[-1]} lie outside the {num_keys} keys"
            raise ValueError(msg)
        if any(a >= b for a, b in pairwise(positions)):
            msg = "query positions must be strictly ascending: sort them and drop duplicates"
            raise ValueError(msg)
        firsts = [0] * len(positions) if first_keys is None else self._checked(first_keys)
        self.first_keys = first_keys.contiguous() if first_keys is not None and any(firsts[-1:]) else None
        self.blocks: list[_Block] = []
        for start in range(0, len(positions), block_rows):
            stop = min(start + block_rows, len(positions))
            keys = firsts[start], firsts[stop - 1], positions[start] + 1, positions[stop - 1] + 1
            self.blocks.append(_Block(start, stop, *keys))
        self._biases: dict[tuple[torch.dtype, int], list[list[tuple[slice, Tensor]]]] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}

    def _checked(self, first_keys: Tensor) -> list[int]:
        check_first_keys(first_keys, self.q_positions)
        firsts: list[int] = first_keys.tolist()
        if any(a > b for a, b in pairwise(firsts)):
            msg = "first_keys must not descend: a later row's window begins no earlier"
            raise ValueError(msg)
        return firsts

    @property
    def num_rows(self) -> int:
        """Number of query rows."""
        return int(self.q_positions.shape[0])

    @property
    def is_dense(self) -> bool:
        """Whether the rows are all the keys, and see all before them: plain causal attention is the same."""
        return self.num_rows == self.num_keys and self.first_keys is None

    def biases(self, dtype: torch.dtype, repeat: int = 1) -> list[list[tuple[slice, Tensor]]]:
        """Return, for each block, stretches of keys and what its scores against them get added.

        Zero where the row may see the key, minus infinity where it may not. Adding measured twenty times
        faster on CPUs than filling a strided view through a boolean mask.

        Parameters
        ----------
        dtype : torch.dtype
        repeat : int
            Times that each row stands in the scores, one after another.

        Returns
        -------
        list of list of (slice, Tensor)
            ``[(stop - start) * repeat, keys of the stretch]`` each; made once.
        """
        if (dtype, repeat) not in self._biases:
            made = [[(keys, self._bias(block, keys, dtype, repeat)) for keys in block.hidden] for block in self.blocks]
            self._biases[dtype, repeat] = made
        return self._biases[dtype, repeat]

    def _bias(self, block: _Block, keys: slice, dtype: torch.dtype, repeat: int) -> Tensor:
        columns = torch.arange(keys.start, keys.stop, device=self.q_positions.device)
        last = self.q_positions[block.start : block.stop].repeat_interleave(repeat)
        hidden = columns > last[:, None]
        if self.first_keys is not None:
            hidden |= columns < self.first_keys[block.start : block.stop].repeat_interleave(repeat)[:, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=columns.device).masked_fill_(hidden, float("-inf"))

    def scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return working memory of at least `numel` elements, kept for the next layer.

        Fresh memory has to be mapped page by page, which for score blocks costs as much as filling them.
        A plan therefore belongs to one forward pass at a time.
        """
        kept = self._scratch.get(dtype)
        if kept is None or kept.numel() < numel:
            kept = self._scratch[dtype] = torch.empty(numel, dtype=dtype, device=self.q_positions.device)
        return kept
