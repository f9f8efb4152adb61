"""KV that replaces a chunk's plain KV in prompts: kept as a sidecar beside it, read as the chunk itself is.

FusionRAG (section 3.1, equation 10) puts the KV that a chunk has behind its similar chunks in place of the plain KV.
The plain KV stays in the store: other chunks are prefilled behind it, and a chunk can be used before it has another.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.errors import FusedKVWarning
from fused_kv_llm.store.format import compress
from fused_kv_llm.store.read import StoredKV, StoredSidecar
from fused_kv_llm.store.sidecars import Sidecars

__all__ = ["REPLACEMENT", "open_replacement", "replacement_name", "replacement_tensors"]

REPLACEMENT = "fusionrag"
"""How the names of all replacements begin."""


def replacement_name(num_neighbours: int) -> str:
    """Return the name of the sidecar with a chunk's KV behind so many similar chunks."""
    return f"{REPLACEMENT}-{num_neighbours}"


def replacement_tensors(kv: ChunkKV, storage: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors of the sidecar, to be written by rows.

    Parameters
    ----------
    kv : ChunkKV
        Rotated for the position of the plain KV.
    storage : str
        Dtype in which the plain KV is stored.
    """
    return compress(kv.keys, kv.values, storage)


def open_replacement(sidecars: Sidecars, plain: StoredKV, name: str) -> StoredKV:
    """Return a chunk with the KV that replaces its own, or as it is where it has none.

    Parameters
    ----------
    sidecars : Sidecars
    plain : StoredKV
        The chunk, opened; closed if there is a replacement.
    name : str
        Name of the replacement.

    Returns
    -------
    StoredKV
        A replacement has a key of its own, another one for each file.
    """
    sidecar = sidecars.open(plain.key, name, whole=True)
    if sidecar is None:
        return plain
    if sidecar.forms != {part.name: (part.shape, part.dtype) for part in plain.header.parts}:
        sidecar.close()
        warnings.warn(
            f"The KV {name!r} of chunk {plain.key[:16]} is not shaped as the chunk's own, which is used instead. "
            "Delete the chunk and ingest it again.",
            FusedKVWarning,
            stacklevel=2,
        )
        return plain
    of_file = hashlib.sha256(f"{plain.key}|{name}|{sidecar.version}".encode()).hexdigest()
    plain.close()
    source = _SidecarLayers(sidecar)
    return StoredKV("memory" if sidecar.in_memory else "disk", replace(plain.header, key=of_file), source)


class _SidecarLayers:
    """Where the layers come from. What finds them damaged names the chunk, which is put away as a whole."""

    def __init__(self, sidecar: StoredSidecar) -> None:
        self.read, self.announce, self.release = sidecar.read, sidecar.announce, sidecar.close
