"""Reading a sidecar some layers at a time, so that a request never holds all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import FileIO

import torch

from fused_kv_llm.errors import ChunkDamagedError, ConfigError
from fused_kv_llm.store.format import TensorFile, byte_view
from fused_kv_llm.store.read.pieces import announce, read_pieces

__all__ = ["StoredSidecar", "read_rows"]


def read_rows(
    fd: int, header: TensorFile, key: str, name: str, start: int = 0, stop: int | None = None
) -> dict[str, torch.Tensor]:
    """Read and verify rows ``start`` to ``stop - 1`` of every tensor of a sidecar.

    Parameters
    ----------
    fd : int
        The file, open for reading.
    header : TensorFile
        Its verified header.
    key, name : str
        The chunk's, and the sidecar's.
    start, stop : int
        Rows that are checked one by one; without them all of it is read, however it is checked.

    Raises
    ------
    ChunkDamagedError
        What is read now is damaged.
    OSError
        It cannot be read now.
    """
    found = {}
    for part in header.parts:
        pieces = (start, len(part.digests) if stop is None else stop)
        shape = part.shape if stop is None else (stop - start, *part.shape[1:])
        tensor = torch.empty(shape, dtype=part.dtype)
        try:
            damaged = read_pieces(fd, part, header.cipher, *pieces, byte_view(tensor))
        except EOFError as error:
            raise ChunkDamagedError(key, f"its sidecar {name!r} was shortened") from error
        if damaged:
            raise ChunkDamagedError(key, f"the checksum of {part.name!r} in its sidecar {name!r} does not match")
        found[part.name] = tensor
    return found


class StoredSidecar:
    """The tensors of one sidecar, cut along their first axis.

    Parameters
    ----------
    key, name : str
        The chunk's, and the sidecar's.
    source : mapping of str to torch.Tensor, or (FileIO, TensorFile)
        The tensors where they are in memory, or the open file, which the reader closes, and its verified header.
    """

    def __init__(self, key: str, name: str, source: Mapping[str, torch.Tensor] | tuple[FileIO, TensorFile]) -> None:
        self._key = key
        self._name = name
        self._tensors = source if isinstance(source, Mapping) else None
        self._file = None if isinstance(source, Mapping) else source
        shapes = _shapes(source)
        # A scalar has no rows.
        self._rows = {name: shape[0] if shape else None for name, shape in shapes.items()}

    @property
    def in_memory(self) -> bool:
        """Whether nothing has to be read."""
        return self._tensors is not None

    @property
    def rows(self) -> int | None:
        """How many rows all tensors have; None if they differ, or one is a scalar."""
        found = set(self._rows.values())
        return found.pop() if len(found) == 1 else None

    def read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return rows ``start`` to ``stop - 1`` of every tensor's first axis; they are shared and must not be changed.

        Raises
        ------
        ConfigError
            A tensor has no such rows. Nothing is wrong with the file.
        ChunkDamagedError
            What is read now is damaged or cannot be read; other rows may have been good.
        """
        self._check_rows(start, stop)
        if self._tensors is not None:
            return {name: tensor[start:stop] for name, tensor in self._tensors.items()}
        if self._file is None:
            raise ChunkDamagedError(self._key, f"its sidecar {self._name!r} was closed while it was read")
        file, header = self._file
        try:
            return read_rows(file.fileno(), header, self._key, self._name, start, stop)
        except OSError as error:
            raise ChunkDamagedError(self._key, f"its sidecar {self._name!r} cannot be read ({error})") from error

    def announce(self, start: int, stop: int) -> None:
        """Have the system read rows ``start`` to ``stop - 1`` ahead, since they will be needed soon.

        Raises
        ------
        ConfigError
            A tensor has no such rows.
        """
        self._check_rows(start, stop)
        if self._file is not None:
            file, header = self._file
            announce(file.fileno(), header.parts, start, stop)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._file is not None:
            self._file[0].close()
            self._file = None

    def _check_rows(self, start: int, stop: int) -> None:
        for name, rows in self._rows.items():
            if rows is None:
                raise ConfigError(
                    f"{name!r} in the sidecar {self._name!r} is a scalar and has no rows. Read the file whole, with "
                    "KVStore.sidecars.read."
                )
            if not 0 <= start <= stop <= rows:
                raise ConfigError(
                    f"Rows {start} to {stop - 1} were asked for, but {name!r} in the sidecar {self._name!r} has rows "
                    f"0 to {rows - 1}. Ask for 0 <= start <= stop <= {rows}."
                )


def _shapes(source: Mapping[str, torch.Tensor] | tuple[FileIO, TensorFile]) -> dict[str, Sequence[int]]:
    if isinstance(source, Mapping):
        return {name: tensor.shape for name, tensor in source.items()}
    return {part.name: part.shape for part in source[1].parts}
