"""Sidecars: small tensors that belong to a chunk and are read without its KV.

A selector's artefacts of the offline stage go here, QCFuse's anchors for example: about a tenth of a chunk's KV,
needed for every chunk of a request while most of their KV is still on its way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path

import torch

from fused_kv_llm.chunk import FORMAT_VERSION
from fused_kv_llm.errors import ChunkDamagedError, ConfigError, StoreUnavailableError
from fused_kv_llm.store.damage import DamageControl, warn
from fused_kv_llm.store.folder import StoreFolder
from fused_kv_llm.store.format import DTYPES, Cipher, TensorFile, check_name, encode_tensors, read_tensor_file
from fused_kv_llm.store.index import ChunkIndex
from fused_kv_llm.store.read import SideMemory, StoredSidecar, read_rows
from fused_kv_llm.store.writer import ChunkWriter

__all__ = ["SIDECAR_FORMAT", "Sidecars", "encode_sidecar", "read_sidecar", "read_sidecar_file"]

SIDECAR_FORMAT = "fused_kv_llm.side"
_ATTEMPTS = 5


class Sidecars:
    """The sidecars of one store, ``KVStore.sidecars``; thread-safe, and safe for several processes.

    They are checksummed and encrypted as the KV is, count towards the disk budget, follow their chunk to the remote
    tier, and go when it goes.

    Parameters
    ----------
    folder, index, writer, damage : StoreFolder, ChunkIndex, ChunkWriter, DamageControl
        The store's.
    cipher : Cipher or None
        Encrypts the files.
    fetch : callable
        Brings chunks from the remote tier and returns the keys of those that came.
    check_writable : callable
        Raises if the store is closed or read-only.
    memory : SideMemory
        Keeps what was read.
    """

    def __init__(
        self,
        folder: StoreFolder,
        index: ChunkIndex,
        writer: ChunkWriter,
        damage: DamageControl,
        cipher: Cipher | None,
        fetch: Callable[[Sequence[str]], set[str]],
        check_writable: Callable[[], None],
        memory: SideMemory,
    ) -> None:
        self._folder = folder
        self._index = index
        self._writer = writer
        self._damage = damage
        self._cipher = cipher
        self._fetch = fetch
        self._check_writable = check_writable
        self._memory = memory

    def has(self, key: str, name: str) -> bool:
        """Whether the chunk has a sidecar of that name."""
        return self._folder.has(key, name) or self._is_remote(key, name)

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
        self._check_writable()
        parts = encode_sidecar(key, name, tensors, self._cipher, by_rows=by_rows)
        for _ in range(_ATTEMPTS):
            nbytes = self._writer.write_sidecar(key, name, parts)
            if nbytes is not None:
                return nbytes
            self._fetch([key])
        raise StoreUnavailableError(
            f"The chunk {key[:16]} is on the remote tier and cannot be brought to the disk now, so it can have no new "
            "sidecar. Check the remote tier, or raise disk_bytes."
        )

    def read(self, key: str, name: str) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a sidecar, on the CPU; they are shared and must not be changed.

        Returns
        -------
        dict of str to torch.Tensor, or None
            None if there is none, or it is damaged: then it is moved to quarantine, with a ``FusedKVWarning``.
        """
        try:
            return self._memory.read(self._path(key, name), lambda: read_sidecar(self._folder, key, name, self._cipher))
        except FileNotFoundError:
            if self._is_remote(key, name) and self._fetch([key]):
                return self.read(key, name)
        except ChunkDamagedError as error:
            self._damage.discard_sidecar(key, name, error.reason)
        except OSError as error:
            warn(f"The sidecar {name!r} of chunk {key} cannot be read now ({error}). It is done without.")
        return None

    def open(self, key: str, name: str) -> StoredSidecar | None:
        """Open a sidecar to read some rows of its tensors at a time; close it afterwards.

        One that this process opens for the second time is read whole, and kept while the budget lasts.

        Returns
        -------
        StoredSidecar or None
            None where :meth:`read` returns None.
        """
        if not self._memory.is_wanted(self._path(key, name)):
            # A file that cannot be used is told of, and dealt with, where it is read whole.
            with suppress(ChunkDamagedError, OSError):
                source = _open_by_rows(self._folder, key, name, self._cipher)
                if source is not None:
                    return StoredSidecar(key, name, source)
        tensors = self.read(key, name)
        return None if tensors is None else StoredSidecar(key, name, tensors)

    def _path(self, key: str, name: str) -> Path:
        return Path(self._folder.chunk_path(key, name))

    def _is_remote(self, key: str, name: str) -> bool:
        place = self._index.ledger.place(key)
        return place is not None and not place.on_disk and name in self._index.ledger.sidecars(key)


def encode_sidecar(
    key: str, name: str, tensors: Mapping[str, torch.Tensor], cipher: Cipher | None, *, by_rows: bool = False
) -> list[memoryview]:
    """Lay out a sidecar in memory.

    Parameters
    ----------
    key : str
        The chunk.
    name : str
        The sidecar's.
    tensors : mapping of str to torch.Tensor
        Floating point, integer or boolean, any shape.
    cipher : Cipher or None
        Encrypts the tensors and their names.
    by_rows : bool
        Whether every row of the tensors' first axes, all equally long, is checked by itself.

    Raises
    ------
    ConfigError
        There is no tensor, or one cannot be stored.
    """
    if not tensors or not all(isinstance(tensor_name, str) and tensor_name for tensor_name in tensors):
        raise ConfigError(f"The sidecar {name!r} of chunk {key[:16]} needs at least one tensor, each with a name.")
    for tensor_name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise ConfigError(f"Tensor {tensor_name!r} is of dtype {tensor.dtype}; use one of {', '.join(DTYPES)}.")
    public = {"format": SIDECAR_FORMAT, "format_version": str(FORMAT_VERSION), "key": key, "name": check_name(name)}
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors.values()} if by_rows else {None}
    if len(rows) > 1 or 0 in rows:
        raise ConfigError(
            f"The tensors of the sidecar {name!r} have different numbers of rows: {sorted(map(str, rows))}."
        )
    return encode_tensors(public, {}, tensors, rows.pop(), cipher)


def read_sidecar(folder: StoreFolder, key: str, name: str, cipher: Cipher | None) -> dict[str, torch.Tensor]:
    """Read and verify a sidecar.

    Raises
    ------
    ChunkDamagedError
        It is truncated, altered, foreign, or another one's.
    FileNotFoundError, OSError
        There is none, or it cannot be read.
    """
    fd = folder.open_file(key, name)
    try:
        return read_sidecar_file(fd, key, name, cipher)
    finally:
        os.close(fd)


def read_sidecar_file(fd: int, key: str, name: str, cipher: Cipher | None) -> dict[str, torch.Tensor]:
    """Read and verify a sidecar that is open; raises as ``read_sidecar``."""
    return read_rows(fd, _header(fd, key, name, cipher), key, name)


def _header(fd: int, key: str, name: str, cipher: Cipher | None) -> TensorFile:
    file = read_tensor_file(fd, key, os.fstat(fd).st_size, str(FORMAT_VERSION), cipher)
    if [file.metadata.get(field) for field in ("format", "key", "name")] != [SIDECAR_FORMAT, key, name]:
        raise ChunkDamagedError(key, f"its sidecar {name!r} is another one's")
    return file


def _open_by_rows(folder: StoreFolder, key: str, name: str, cipher: Cipher | None) -> tuple[FileIO, TensorFile] | None:
    """Open a sidecar whose rows are checked one by one; None if its are not."""
    with ExitStack() as stack:
        file = stack.enter_context(FileIO(folder.open_file(key, name)))
        header = _header(file.fileno(), key, name, cipher)
        # A scalar has no rows.
        if any(not part.shape or len(part.digests) != part.shape[0] for part in header.parts):
            return None
        stack.pop_all()
        return file, header
