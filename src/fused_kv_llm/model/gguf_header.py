"""The header of a GGUF file: its architecture, its settings, and where its tensors lie.

Read here rather than with the ``gguf`` package, which takes many seconds for a large vocabulary: a file of a type that
is refused, or one that is damaged, is known at once.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fused_kv_llm.errors import ModelFileError

__all__ = ["GGUFHeader", "GGUFTensor", "is_gguf", "read_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Value types of a fixed size, by their number in the format.
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies.

    Parameters
    ----------
    elements : int
        Values, not bytes.
    dtype : int
        Number of its type in the format; 0 is float32.
    begin, end : int
        Bytes in the file, half-open.
    """

    elements: int
    dtype: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a file says of itself.

    Parameters
    ----------
    architecture : str
        llama.cpp's name of the kind of model.
    values : dict
        Settings by their full names; an array is its length.
    tensors : dict of str to GGUFTensor
    """

    architecture: str
    values: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def num_elements(self) -> int:
        """Values of all tensors together."""
        return sum(tensor.elements for tensor in self.tensors.values())

    def setting(self, name: str) -> Any:
        """Return a setting of the architecture, for example ``"rope.freq_base"``; None if the file has none."""
        return self.values.get(f"{self.architecture}.{name}")


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as GGUF files do."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_header(path: Path) -> GGUFHeader:
    """Read a file's header, and check that all the tensors it lists are there.

    Parameters
    ----------
    path : Path

    Returns
    -------
    GGUFHeader

    Raises
    ------
    ModelFileError
        If it is no GGUF file, of another version, or truncated.
    MissingExtraError
        If ``gguf``, which knows the sizes of tensors, is not installed.
    """
    if path.stat().st_size < len(_MAGIC) or not is_gguf(path):
        raise ModelFileError(
            f"{str(path)!r} is not a GGUF file: it does not begin with {_MAGIC.decode()}. Was it downloaded whole, and "
            "not as a page or a pointer to it?"
        )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            header = _Parser(data).header(path)
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise _damaged(path, f"its header breaks off ({error})") from error
        for name, tensor in header.tensors.items():
            if tensor.end > len(data):
                raise _damaged(path, f"its tensor {name} ends at byte {tensor.end:,}, the file at {len(data):,}")
    return header


def _damaged(path: Path, reason: str) -> ModelFileError:
    return ModelFileError(f"The GGUF file {str(path)!r} is damaged or truncated: {reason}. Fetch it again.")


class _Parser:
    """Goes through the bytes of a header once.

    Parameters
    ----------
    data : mmap.mmap
        The whole file.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, len(_MAGIC)

    def header(self, path: Path) -> GGUFHeader:
        """Return what the file says, from its beginning."""
        version = self._number("<I")
        if version not in _VERSIONS:
            raise ModelFileError(
                f"The GGUF file {str(path)!r} is of version {version}; versions {_VERSIONS} can be read. Convert the "
                "model again with a present llama.cpp."
            )
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        values = {self._string(): self._value(self._number("<I")) for _ in range(num_values)}
        architecture = values.get("general.architecture")
        if not isinstance(architecture, str):
            raise _damaged(path, "it does not name its architecture")
        found = [self._tensor(path) for _ in range(num_tensors)]
        alignment = values.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _damaged(path, f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {
            name: GGUFTensor(elements, dtype, start + offset, start + offset + size)
            for name, elements, dtype, offset, size in found
        }
        return GGUFHeader(architecture, values, tensors)

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _skip(self, size: int) -> int:
        """Move on by that many bytes; return where they begin."""
        begin, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise IndexError(f"{size:,} bytes at byte {begin:,}, the file has {len(self._data):,}")
        return begin

    def _string(self) -> str:
        begin = self._skip(self._number("<Q"))
        return self._data[begin : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind in _FORMATS:
            return self._number(_FORMATS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise IndexError(f"a value of type {kind}")
        inner, length = self._number("<I"), self._number("<Q")
        if inner in _FORMATS:
            self._skip(length * struct.calcsize(_FORMATS[inner]))
        elif inner == _STRING:
            for _ in range(length):
                self._skip(self._number("<Q"))
        else:
            raise IndexError(f"an array of type {inner}")
        return length

    def _tensor(self, path: Path) -> tuple[str, int, int, int, int]:
        """Return a tensor's name, elements, type, offset among the tensors, and bytes."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, num_dimensions = self._string(), self._number("<I")
        if num_dimensions > _MOST_DIMENSIONS:
            raise IndexError(f"a tensor of {num_dimensions} dimensions")
        elements = prod(self._number("<Q") for _ in range(num_dimensions))
        dtype, offset = self._number("<I"), self._number("<Q")
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(dtype)]
        except (ValueError, KeyError) as error:
            raise ModelFileError(
                f"The GGUF file {str(path)!r} holds the tensor {name} in type {dtype}, which the installed package "
                "'gguf' does not know. Update it, or take the model in another quantization, such as Q8_0."
            ) from error
        return name, elements, dtype, offset, elements // block * size
