"""An opened sidecar."""

from __future__ import annotations

import threading

import torch

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store.folder import FileVersion
from fused_kv_llm.store.read.memory import ResidentFile
from fused_kv_llm.store.read.open_file import OpenFile

__all__ = ["StoredSidecar"]


class StoredSidecar:
    """A sidecar that was opened for reading, some rows of its tensors at a time.

    Obtained from ``Sidecars.open``. One that was not stored by rows is read as a whole when it is opened.

    Parameters
    ----------
    source : ResidentFile or OpenFile
        Gives the tensors; ``close`` releases it.

    Raises
    ------
    ChunkDamagedError
        It had to be read as a whole, and is damaged.
    """

    def __init__(self, source: ResidentFile | OpenFile) -> None:
        self._source = source
        self._closed = False
        self._lock = threading.Lock()
        self._shapes = {part.name: part.shape for part in source.header.parts}
        in_memory = isinstance(source, ResidentFile) or not source.header.is_by_rows
        self._tensors: dict[str, torch.Tensor] | None = source.read_all() if in_memory else None

    @property
    def in_memory(self) -> bool:
        """Whether nothing has to be read."""
        return self._tensors is not None

    @property
    def version(self) -> FileVersion:
        """Which file it is: one that has replaced another has another version."""
        return self._source.version

    @property
    def forms(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor, by its name."""
        return {part.name: (part.shape, part.dtype) for part in self._source.header.parts}

    @property
    def rows(self) -> int | None:
        """Length of all tensors' first axes; None if they differ, or one tensor is a scalar."""
        found = {shape[0] if shape else None for shape in self._shapes.values()}
        return found.pop() if len(found) == 1 else None

    def read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return rows ``start`` to ``stop - 1`` of every tensor; they are shared and must not be changed.

        Raises
        ------
        ConfigError
            A tensor has no such rows. Nothing is wrong with the file.
        ChunkDamagedError
            One of these rows is damaged or cannot be read; others may be good.
        StoreError
            The sidecar was closed.
        """
        self._check_rows(start, stop)
        if self._tensors is not None:
            return {name: tensor[start:stop] for name, tensor in self._tensors.items()}
        return self._source.read(start, stop)

    def load(self, start: int, stop: int) -> None:
        """Bring rows ``start`` to ``stop - 1`` into memory, where :meth:`read` finds them; raises as it does.

        A sidecar that is read for a moment only, see ``Sidecars.open``, keeps nothing.
        """
        self.read(start, stop)

    def announce(self, start: int, stop: int) -> None:
        """Ask the system to read rows ``start`` to ``stop - 1`` ahead, since they will be needed soon.

        Raises
        ------
        ConfigError
            A tensor has no such rows.
        """
        self._check_rows(start, stop)
        if self._tensors is None:
            self._source.announce(start, stop)

    def close(self) -> None:
        """Release the file; rows that were read stay valid. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._source.release()

    def _check_rows(self, start: int, stop: int) -> None:
        sidecar = self._source.header.name
        for name, shape in self._shapes.items():
            if not shape:
                raise ConfigError(
                    f"{name!r} in the sidecar {sidecar!r} is a scalar and has no rows. Read the whole sidecar, with "
                    "KVStore.sidecars.read."
                )
            if not 0 <= start <= stop <= shape[0]:
                raise ConfigError(
                    f"Rows {start} to {stop - 1} were asked for, but {name!r} in the sidecar {sidecar!r} has rows 0 to "
                    f"{shape[0] - 1}. Ask for 0 <= start <= stop <= {shape[0]}."
                )
