"""The variants of chunks: KV behind other chunks, kept as sidecars beside the plain KV (Cache-Craft section 3.3)."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from fused_kv_llm.errors import ChunkDamagedError, StoreError, StoreFullError, VariantDamagedError
from fused_kv_llm.store.format import compress
from fused_kv_llm.store.index import Entry, resolve_policy
from fused_kv_llm.store.read import StoredKV, StoredSidecar
from fused_kv_llm.store.sidecars import Sidecars
from fused_kv_llm.store.variant_record import VARIANT, VariantRecord, about_name, is_about

__all__ = ["Variants"]

_Id = tuple[str, str]


class Variants:
    """Keeps variants within a number for each chunk and a number of bytes for all; thread-safe.

    They are written, checked, encrypted and deleted as other sidecars of their chunk, whose key has the model and the
    tenant in it. The chunk's plain KV is not one of them, and neither it nor another chunk ever makes room for one.
    When there is no room, the variant of the lowest ``f_r`` goes (section 3.3): every use adds ``1 / CFO``. That is
    counted in this process, from its start.

    Parameters
    ----------
    sidecars : Sidecars
        The store's.
    most : int
        Variants of one chunk.
    max_bytes : int or None
        Bytes of the variants of all chunks; None for as many as the store has room for.
    """

    def __init__(self, sidecars: Sidecars, most: int, max_bytes: int | None) -> None:
        self._sidecars, self._most, self._max_bytes = sidecars, most, max_bytes
        self._priority = resolve_policy("reuse")
        self._uses: dict[_Id, Entry] = {}
        # What was found damaged in a store that cannot be written.
        self._ignored: set[_Id] = set()
        self._lock = threading.Lock()
        self._writing = threading.Lock()

    # -- looking up ------------------------------------------------------------------------------------------

    def names(self, key: str) -> list[str]:
        """Return the names of a chunk's variants, in their order."""
        names = [name.removesuffix(about_name("")) for name in self._sidecars.names(key) if is_about(name)]
        return [name for name in names if (key, name) not in self._ignored]

    def record(self, key: str, name: str) -> VariantRecord:
        """Return what is recorded of a variant.

        Raises
        ------
        VariantDamagedError
            It is gone or damaged.
        """
        tensors = self._sidecars.read(key, about_name(name))
        record = None if tensors is None else VariantRecord.of_tensors(tensors)
        if record is None or record.name != name:
            raise VariantDamagedError(key, name, "its record is missing or cannot be read")
        return record

    def open(self, plain: StoredKV, record: VariantRecord) -> StoredKV:
        """Open a variant; it reads as the chunk's plain KV does, but for tokens that are not covered.

        Parameters
        ----------
        plain : StoredKV
            The chunk, opened.
        record : VariantRecord
            One of its variants.

        Returns
        -------
        StoredKV
            With a key of its own. What finds it damaged raises :class:`.VariantDamagedError`.

        Raises
        ------
        VariantDamagedError
            It is gone, damaged, or of another shape than the chunk.
        """
        sidecar = self._sidecars.open(plain.key, record.name, whole=True)
        if sidecar is None:
            raise VariantDamagedError(plain.key, record.name, "its KV is missing or cannot be read")
        forms = {part.name: (part.shape, part.dtype) for part in plain.header.parts}
        forms["place"] = (plain.num_layers, 3), torch.int64
        if sidecar.forms != forms:
            sidecar.close()
            raise VariantDamagedError(plain.key, record.name, "its tensors are not shaped as the chunk's")
        of_place = f"{plain.key}|{record.name}|{record.place.tolist()}"
        header = replace(plain.header, key=hashlib.sha256(of_place.encode()).hexdigest(), position=record.position)
        source = _VariantLayers(sidecar, plain.key, record)
        return StoredKV("memory" if sidecar.in_memory else "disk", header, source)

    def used(self, key: str, name: str, overhead: float, num_tokens: int) -> None:
        """Count a use of a variant: ``f_r += 1 / CFO``.

        Parameters
        ----------
        key, name : str
            The chunk and its variant.
        overhead : float
            CFO; one that recomputes nothing counts as one that recomputes one token.
        num_tokens : int
            Of the chunk.
        """
        with self._lock:
            entry = self._uses.get((key, name), Entry(1.0))
            self._uses[key, name] = entry.touched(time.time(), 1.0 / max(overhead, 1.0 / num_tokens))

    # -- writing ---------------------------------------------------------------------------------------------

    def has(self, key: str, name: str) -> bool:
        """Whether a chunk has a variant of that name."""
        return self._sidecars.has(key, about_name(name))

    def put(self, key: str, record: VariantRecord, keys: Tensor, values: Tensor, storage: str) -> int:
        """Write a variant, unless there is one of its name or no room.

        Parameters
        ----------
        key : str
            A chunk that is stored.
        record : VariantRecord
        keys, values : Tensor
            ``[L, Hkv, T, D]`` and ``[L, Hkv, T, Dv]``, rotated for ``record.position`` onwards.
        storage : str
            Dtype in which the chunk is stored.

        Returns
        -------
        int
            Bytes that were written; 0 if none were.

        Raises
        ------
        ConfigError
            The chunk is not stored any more.
        StoreUnavailableError
            The store cannot be written.
        """
        with self._writing:
            if self.has(key, record.name):
                return 0
            place = record.place.expand(keys.shape[0], 3).contiguous()
            tensors = {**compress(keys, values, storage), "place": place}
            about = record.tensors()
            nbytes = sum(tensor.nbytes for part in (tensors, about) for tensor in part.values())
            if not self._make_room(key, nbytes):
                return 0
            try:
                written = self._sidecars.put(key, record.name, tensors, by_rows=True)
                # Last, since it is what others find the variant by.
                written += self._sidecars.put(key, about_name(record.name), about)
            except StoreFullError:
                self._sidecars.remove(key, record.name)
                return 0
            with self._lock:
                self._uses[key, record.name] = Entry(written, used=time.time())
            self._ignored.discard((key, record.name))
            return written

    def discard(self, key: str, name: str) -> None:
        """Use a variant no more; delete it, unless the store cannot be written."""
        self._ignored.add((key, name))
        with suppress(StoreError):
            self.remove(key, name)

    def remove(self, key: str, name: str) -> None:
        """Delete a variant, which need not be there; raises as :meth:`Sidecars.remove`."""
        self._sidecars.remove(key, about_name(name))
        self._sidecars.remove(key, name)
        with self._lock:
            self._uses.pop((key, name), None)

    def usage(self) -> tuple[int, int]:
        """Return how many variants the store has on its disk, of all identities, and their bytes."""
        sizes = self._sizes()
        return len(sizes), sum(sizes.values())

    def _sizes(self) -> dict[_Id, int]:
        found: dict[_Id, int] = {}
        for (key, sidecar), nbytes in self._sidecars.sizes(VARIANT).items():
            name = sidecar.removesuffix(about_name(""))
            found[key, name] = found.get((key, name), 0) + nbytes
        return found

    def _make_room(self, key: str, nbytes: int) -> bool:
        """Delete variants of the lowest f_r until one more has room; False if there is none without them."""
        sizes = self._sizes()
        most = float("inf") if self._max_bytes is None else self._max_bytes
        if nbytes > most or self._most < 1:
            return False
        while True:
            own = [one for one in sizes if one[0] == key]
            if len(own) >= self._most:
                victims: Iterable[_Id] = own
            elif sum(sizes.values()) + nbytes > most or not self._sidecars.fits(nbytes):
                victims = sizes
            else:
                return True
            victim = min(victims, key=self._value, default=None)
            if victim is None:
                return False
            self.remove(*victim)
            del sizes[victim]

    def _value(self, one: _Id) -> tuple[float, float]:
        with self._lock:
            entry = self._uses.get(one, Entry(1.0))
        return self._priority(entry, 0.0), entry.used


class _VariantLayers:
    """Where an opened variant's layers come from."""

    def __init__(self, sidecar: StoredSidecar, key: str, record: VariantRecord) -> None:
        self._sidecar, self._key, self._name, self._place = sidecar, key, record.name, record.place

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the stored tensors of layers ``start`` to ``stop - 1``, verified."""
        try:
            parts = dict(self._sidecar.read(start, stop))
        except ChunkDamagedError as error:
            raise VariantDamagedError(self._key, self._name, error.reason) from error
        if not bool((parts.pop("place") == self._place).all()):
            raise VariantDamagedError(self._key, self._name, "it is not the one that its record is of")
        return parts

    def announce(self, start: int, stop: int) -> None:
        """Ask the system to read layers ``start`` to ``stop - 1`` ahead."""
        self._sidecar.announce(start, stop)

    def release(self) -> None:
        """Release the sidecar."""
        self._sidecar.close()
