"""Sidecars: small tensors that belong to a chunk and are read without its KV.

What the offline stage computes for a chunk besides its KV goes here: its context shift, or the anchors of a selector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from fused_kv_llm.errors import ChunkDamagedError, StoreUnavailableError
from fused_kv_llm.store.damage import warn
from fused_kv_llm.store.parts import StoreParts
from fused_kv_llm.store.read import StoredSidecar

__all__ = ["Sidecars"]

_ATTEMPTS = 5
_Opened = TypeVar("_Opened")


class Sidecars:
    """The sidecars of one store, ``KVStore.sidecars``; thread-safe, and safe for several processes.

    They are checksummed, encrypted and kept in memory as chunks are, count towards the disk budget, follow their chunk
    to the remote tier, and go when it goes.

    Parameters
    ----------
    parts : StoreParts
        The store's.
    """

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts

    def has(self, key: str, name: str) -> bool:
        """Whether the chunk has a sidecar of that name."""
        return self._parts.folder.has(key, name) or self._is_remote(key, name)

    def lacking(self, identity: str, name: str) -> list[str]:
        """Return the keys of an identity's chunks that have no sidecar of that name."""
        return self._parts.index.keys_without_sidecar(identity, name)

    def names(self, key: str) -> list[str]:
        """Return the names of a chunk's sidecars, in their order."""
        return sorted(self._parts.index.ledger.sidecars(key))

    def sizes_of(self, key: str) -> dict[str, int]:
        """Return the names and bytes of a chunk's sidecars."""
        return self._parts.index.ledger.sidecars(key)

    def sizes(self, beginning: str) -> dict[tuple[str, str], int]:
        """Return the bytes of all sidecars on the disk whose names have this beginning, by chunk and name."""
        return self._parts.index.ledger.sidecars_named(beginning)

    def fits(self, nbytes: int) -> bool:
        """Whether the disk budget has room for so many more bytes, so that no chunk makes room for them."""
        return self._parts.budget.fits(nbytes)

    def remove(self, key: str, name: str) -> None:
        """Delete a sidecar, which need not be there.

        Raises
        ------
        StoreUnavailableError
            The store is closed, read-only or cannot be written.
        """
        self._parts.check_writable()
        with self._parts.index.transaction():
            self._parts.index.ledger.drop_sidecar(key, name)
            self._parts.folder.remove(key, name)
        self._parts.reader.forget_sidecar(key, name)

    def put(self, key: str, name: str, tensors: Mapping[str, torch.Tensor], *, by_rows: bool = False) -> int:
        """Write a sidecar, replacing an old one.

        Parameters
        ----------
        key : str
            A chunk that is stored.
        name : str
            What it is, and every parameter it depends on: letters, digits, ``_``, ``-`` and ``.``.
        tensors : mapping of str to torch.Tensor
            Floating point, integer or boolean, any shape, any device.
        by_rows : bool
            Whether :meth:`open` should be able to read some rows of the tensors' first axes, all equally long.

        Returns
        -------
        int
            Bytes of the file.

        Raises
        ------
        ConfigError
            The chunk is not stored, or the name or a tensor cannot be used.
        StoreFullError, StoreUnavailableError
            It cannot be written, or the store is closed or read-only; nothing is left behind then.
        """
        self._parts.check_writable()
        data = self._parts.codec.encode_sidecar(key, name, tensors, by_rows=by_rows)
        for _ in range(_ATTEMPTS):
            nbytes = self._parts.writer.write_sidecar(key, name, data)
            if nbytes is not None:
                return nbytes
            self._parts.fetch([key])
        raise StoreUnavailableError(
            f"The chunk {key[:16]} is on the remote tier and cannot be brought to the disk now, so it can have no new "
            "sidecar. Check the remote tier, or raise disk_bytes."
        )

    def read(
        self, key: str, name: str, fits: Callable[[Mapping[str, torch.Tensor]], bool] | None = None
    ) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a sidecar, on the CPU; they are shared and must not be changed.

        Parameters
        ----------
        key, name : str
            The chunk, and which of its sidecars.
        fits : callable or None
            Whether the tensors are what the caller can use; a sidecar with others counts as damaged.

        Returns
        -------
        dict of str to torch.Tensor, or None
            None if there is none, or it is damaged: then it is moved to quarantine, with a ``FusedKVWarning``.
        """

        def read_all() -> dict[str, torch.Tensor]:
            source = self._parts.reader.acquire(key, name, whole=True)
            try:
                tensors = source.read_all()
            finally:
                source.release()
            if fits is not None and not fits(tensors):
                raise ChunkDamagedError(key, "its tensors do not fit this model and this chunk")
            return tensors

        return self._attempt(key, name, read_all)

    def open(self, key: str, name: str, *, whole: bool = False) -> StoredSidecar | None:
        """Open a sidecar to read some rows of its tensors at a time; close it afterwards.

        A sidecar that this process opens for the second time is kept in memory when all of it is read, while the budget
        lasts.

        Parameters
        ----------
        key, name : str
            The chunk, and which of its sidecars.
        whole : bool
            Whether all rows will be read, so that it is kept the first time, and :meth:`StoredSidecar.load` has a use.

        Returns
        -------
        StoredSidecar or None
            None where :meth:`read` returns None.
        """

        def open_rows() -> StoredSidecar:
            source = self._parts.reader.acquire(key, name, whole=whole)
            try:
                return StoredSidecar(source)
            except BaseException:
                source.release()
                raise

        return self._attempt(key, name, open_rows)

    def _attempt(self, key: str, name: str, opening: Callable[[], _Opened]) -> _Opened | None:
        """Open a sidecar that may be on the remote tier, or damaged; None if it cannot be used."""
        try:
            try:
                return opening()
            except FileNotFoundError:
                if self._is_remote(key, name) and self._parts.fetch([key]):
                    return opening()
        except FileNotFoundError:
            pass
        except ChunkDamagedError as error:
            self._parts.damage.discard_sidecar(key, name, error.reason)
        except OSError as error:
            warn(f"The sidecar {name!r} of chunk {key} cannot be read now ({error}). It is done without.")
        return None

    def _is_remote(self, key: str, name: str) -> bool:
        place = self._parts.index.ledger.place(key)
        return place is not None and not place.on_disk and name in self._parts.index.ledger.sidecars(key)
