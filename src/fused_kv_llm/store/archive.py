"""Archives: export of chunks to one file for another machine, and import.

An archive is an uncompressed tar file of the store's own files, ``<key>.safetensors`` and
``<key>.<name>.safetensors``; an encrypted store exports encrypted files. Nothing is unpacked to a path that an archive
names: members whose names are not a chunk's or sidecar's are refused, the others are verified in memory and stored as
chunks that were computed here are.
"""

from __future__ import annotations

import os
import secrets
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fused_kv_llm.errors import ChunkDamagedError, ConfigError, StoreFullError, StoreUnavailableError
from fused_kv_llm.store.format import file_name, parse_name
from fused_kv_llm.store.index import ChunkRow
from fused_kv_llm.store.parts import StoreParts
from fused_kv_llm.store.read import as_file, verify_chunk, verify_sidecar

__all__ = ["Archive", "ExportReport", "ImportReport"]

Progress = Callable[[int, int], None]
_BATCH = 64
# Raised by tarfile for forged headers, besides its own errors.
_MALFORMED = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError, MemoryError)


@dataclass(slots=True)
class ExportReport:
    """What was written to an archive.

    Parameters
    ----------
    chunks, nbytes : int
        Chunks, and the bytes of their files and sidecars.
    missed : list of str
        Keys of chunks that have a row but could not be read.
    """

    chunks: int = 0
    nbytes: int = 0
    missed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ImportReport:
    """What was taken from an archive.

    Parameters
    ----------
    chunks, sidecars, nbytes : int
        New chunks, new sidecars, and the bytes of both.
    present : int
        Chunks and sidecars that were stored already.
    refused : list of tuple of str
        Members that were not imported: name and reason.
    """

    chunks: int = 0
    sidecars: int = 0
    nbytes: int = 0
    present: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)


class Archive:
    """Export and import of one store, ``KVStore.archive``.

    Parameters
    ----------
    parts : StoreParts
        The store's.
    """

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts

    def export(
        self, path: str | Path, *, identity: str | None = None, progress: Progress | None = None
    ) -> ExportReport:
        """Write the store's chunks to a file, completely or not at all.

        Parameters
        ----------
        path : str or Path
            The archive; an existing file is replaced.
        identity : str or None
            Only chunks of this identity (``KVIdentity.digest``).
        progress : callable or None
            Called with the number of chunks done and their number.

        Returns
        -------
        ExportReport

        Raises
        ------
        StoreUnavailableError
            The archive cannot be written.
        """
        target = Path(path).expanduser()
        temp = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        keys = self._keys(identity)
        report = ExportReport()
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
                    for start in range(0, len(keys), _BATCH):
                        batch = keys[start : start + _BATCH]
                        self._parts.fetch(batch)
                        for key in batch:
                            self._export(archive, key, report)
                        if progress is not None:
                            progress(start + len(batch), len(keys))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, target)
        except OSError as error:
            raise StoreUnavailableError(f"The archive {target} cannot be written: {error}.") from error
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temp)
        return report

    def _keys(self, identity: str | None) -> list[str]:
        names = [totals.identity for totals in self._parts.index.totals()] if identity is None else [identity]
        return [key for name in names for key in self._parts.index.keys(name)]

    def _export(self, archive: tarfile.TarFile, key: str, report: ExportReport) -> None:
        for name in (None, *self._parts.index.ledger.sidecars(key)):
            try:
                # The open file is held, so that it is not evicted while it is copied.
                fd = self._parts.folder.open_file(key, name)
            except (ChunkDamagedError, OSError):
                if name is None:
                    report.missed.append(key)
                    return
                continue
            with open(fd, "rb") as file:
                member = tarfile.TarInfo(file_name(key, name))
                member.size, member.mode = os.fstat(fd).st_size, 0o600
                archive.addfile(member, file)
                report.nbytes += member.size
        report.chunks += 1

    def load(self, path: str | Path, *, progress: Progress | None = None) -> ImportReport:
        """Import the chunks of an archive.

        Parameters
        ----------
        path : str or Path
            What ``export`` wrote; its content is not trusted.
        progress : callable or None
            Called with the number of bytes done and their number.

        Returns
        -------
        ImportReport

        Raises
        ------
        StoreUnavailableError
            The archive cannot be read; what was imported before the error is kept.
        StoreFullError
            The disk or the budget is full; what was imported is kept, and importing again continues there.
        """
        self._parts.check_writable()
        source = Path(path).expanduser()
        report = ImportReport()
        try:
            total = source.stat().st_size
            for archive, member in _members(source):
                self._load(archive, member, total, report)
                if progress is not None:
                    progress(min(archive.offset, total), total)
        except (OSError, tarfile.TarError) as error:
            raise StoreUnavailableError(
                f"The archive {source} cannot be read: {error}. It is what fused-kv store export writes."
            ) from error
        return report

    def _load(self, archive: tarfile.TarFile, member: tarfile.TarInfo, total: int, report: ImportReport) -> None:
        parsed = parse_name(member.name)
        if parsed is None or not member.isreg() or member.issparse() or member.size > total:
            report.refused.append((member.name, "it is not a chunk's file"))
            return
        file = archive.extractfile(member)
        data = memoryview(file.read() if file is not None else b"")
        key, name = parsed
        try:
            taken = self._take_chunk(key, data) if name is None else self._take_sidecar(key, name, data)
        except StoreFullError:
            raise
        except (ChunkDamagedError, ConfigError) as error:
            report.refused.append((member.name, error.reason if isinstance(error, ChunkDamagedError) else str(error)))
            return
        report.chunks += taken and name is None
        report.sidecars += taken and name is not None
        report.present += not taken
        report.nbytes += len(data) * taken

    def _take_chunk(self, key: str, data: memoryview) -> bool:
        with self._parts.writer.lock(key):
            if self._parts.writer.is_stored(key):
                return False
            with as_file(data) as fd:
                header = verify_chunk(self._parts.codec, fd, key)
            row = ChunkRow.from_header(header, len(data))
            return self._parts.writer.write(row, header.content, [data], float(header.num_tokens))

    def _take_sidecar(self, key: str, name: str, data: memoryview) -> bool:
        if name in self._parts.index.ledger.sidecars(key):
            return False
        with as_file(data) as fd:
            verify_sidecar(self._parts.codec, fd, key, name)
        return self._parts.writer.write_sidecar(key, name, [data]) is not None


def _members(source: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the open archive and each of its members, in order; always ends, whatever the headers say.

    Raises
    ------
    OSError, tarfile.TarError
        It cannot be read, or a header is malformed.
    """
    with _tar_errors():
        # Uncompressed only: then no member is longer than the file.
        archive = tarfile.open(source, mode="r:")  # noqa: SIM115
    with archive:
        while True:
            with _tar_errors():
                member = archive.next()
            if member is None:
                return
            # A negative size leads back to an earlier member, in an endless loop.
            if member.size < 0 or archive.offset <= member.offset:
                raise tarfile.ReadError(f"the member {member.name!r} has a negative size")
            yield archive, member


@contextmanager
def _tar_errors() -> Iterator[None]:
    try:
        yield
    except _MALFORMED as error:
        raise tarfile.ReadError(f"a header is malformed ({error})") from error
