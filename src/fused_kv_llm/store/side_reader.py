"""Reading a side file some layers at a time, so that a request never holds all of it."""

from __future__ import annotations

from collections.abc import Mapping
from io import FileIO

import torch

from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.pieces import read_pieces
from fused_kv_llm.store.tensor_file import TensorFile, byte_view

__all__ = ["SideReader"]


class SideReader:
    """The tensors of one side file, cut along their first axis.

    Parameters
    ----------
    key, name : str
        The chunk's, and the side file's.
    source : mapping of str to torch.Tensor, or (FileIO, TensorFile)
        The tensors where they are in memory, or the open file, which the reader closes, and its verified header.
    """

    def __init__(self, key: str, name: str, source: Mapping[str, torch.Tensor] | tuple[FileIO, TensorFile]) -> None:
        self._key = key
        self._name = name
        self._tensors = source if isinstance(source, Mapping) else None
        self._file = None if isinstance(source, Mapping) else source

    @property
    def in_memory(self) -> bool:
        """Whether nothing has to be read."""
        return self._tensors is not None

    def read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return rows ``start`` to ``stop - 1`` of every tensor's first axis; they are shared and must not be changed.

        Raises
        ------
        ChunkDamagedError
            What is read now is damaged or cannot be read; other rows may have been good.
        """
        if self._tensors is not None:
            return {name: tensor[start:stop] for name, tensor in self._tensors.items()}
        if self._file is None:
            raise ChunkDamagedError(self._key, f"its side file {self._name!r} was closed while it was read")
        file, header = self._file
        found = {}
        for part in header.parts:
            tensor = torch.empty((stop - start, *part.shape[1:]), dtype=part.dtype)
            try:
                damaged = read_pieces(file.fileno(), part, header.cipher, start, stop, byte_view(tensor))
            except (OSError, EOFError) as error:
                raise ChunkDamagedError(self._key, f"its side file {self._name!r} cannot be read ({error})") from error
            if damaged:
                reason = f"the checksum of {part.name!r} in its side file {self._name!r} does not match"
                raise ChunkDamagedError(self._key, reason)
            found[part.name] = tensor
        return found

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._file is not None:
            self._file[0].close()
            self._file = None
