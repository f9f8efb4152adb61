"""Small files beside a chunk's KV: what was derived from it and is read on its own.

::

    kv_dir/sides/<name>/ab/<key>.safetensors

An ordinary safetensors file whose metadata has the xxh3-64 of the tensors' bytes. A file appears by ``rename``; one
that is damaged is deleted with a warning, since it can be derived again.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fused_kv_llm.errors import FusedKVWarning, StoreFullError, StoreUnavailableError
from fused_kv_llm.store.file_format import byte_view
from fused_kv_llm.store.layout import check_key

__all__ = ["SideFiles"]

_CHECKSUM = "xxh3_64"


class SideFiles:
    """The side files of one store; thread-safe, and safe for several processes.

    Parameters
    ----------
    kv_dir : Path
        The store's folder.
    """

    def __init__(self, kv_dir: Path) -> None:
        self._root = kv_dir / "sides"

    def _path(self, key: str, name: str) -> Path:
        check_key(key)
        return self._root / name / key[:2] / f"{key}.safetensors"

    def has(self, key: str, name: str) -> bool:
        """Whether the chunk has a side file of that name."""
        return self._path(key, name).is_file()

    def put(self, key: str, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Write a side file, replacing an old one.

        Parameters
        ----------
        key : str
            The chunk.
        name : str
            What it is, and every parameter it depends on: a valid folder name.
        tensors : mapping of str to Tensor
            Contiguous, on the CPU.

        Returns
        -------
        int
            Bytes of the file.

        Raises
        ------
        StoreFullError, StoreUnavailableError
            If it cannot be written; nothing is left behind then.
        """
        path = self._path(key, name)
        temporary: str | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
            os.close(handle)
            save_file(dict(tensors), temporary, metadata={_CHECKSUM: _checksum(tensors)})
            nbytes = os.stat(temporary).st_size
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            if temporary is not None:
                with suppress(OSError):
                    os.unlink(temporary)
            # The safetensors package wraps the disk's own error and keeps its text only.
            full = "No space left" in str(error) or "quota" in str(error)
            kind = StoreFullError if full else StoreUnavailableError
            raise kind(f"A side file could not be written below {self._root}: {error}") from error
        return nbytes

    def read(self, key: str, name: str) -> dict[str, Tensor] | None:
        """Return the tensors of a side file, on the CPU; None if there is none, or it is damaged.

        A damaged file is deleted, with a ``FusedKVWarning``.
        """
        path = self._path(key, name)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {tensor: file.get_tensor(tensor) for tensor in file.keys()}  # noqa: SIM118
                stored = (file.metadata() or {}).get(_CHECKSUM)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            self._drop(path, str(error))
            return None
        if stored == _checksum(tensors):
            return tensors
        self._drop(path, "its checksum does not match")
        return None

    def delete(self, keys: Iterable[str]) -> None:
        """Delete all side files of these chunks."""
        names = [folder.name for folder in self._root.iterdir()] if self._root.is_dir() else []
        for key in keys:
            for name in names:
                self._path(key, name).unlink(missing_ok=True)

    def _drop(self, path: Path, reason: str) -> None:
        with suppress(OSError):
            path.unlink()
        warnings.warn(f"The side file {path} cannot be used: {reason}; it was deleted.", FusedKVWarning, stacklevel=3)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        digest.update(byte_view(tensor.contiguous()))
    return digest.hexdigest()
