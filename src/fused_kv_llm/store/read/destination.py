"""What is wanted of a tensor of a file, and where it belongs."""

from __future__ import annotations

from typing import NamedTuple

from fused_kv_llm.store.format import Part
from fused_kv_llm.store.read.strided import Segments

__all__ = ["Destination"]


class Destination(NamedTuple):
    """Where some pieces of a tensor belong.

    Parameters
    ----------
    part : Part
        The tensor.
    start : int
        The first piece.
    segments : Segments
        The memory of these pieces.
    """

    part: Part
    start: int
    segments: Segments

    @property
    def offset(self) -> int:
        """Where the pieces begin in the file."""
        return self.part.start + self.start * self.part.piece_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return self.segments.pieces * self.part.piece_nbytes
