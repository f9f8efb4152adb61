"""Reference KV: what a model computed for a fixed prompt when the first chunks of its identity were stored.

An identity is made of what can be hashed. A reference tells whether a model that has the same identity still computes
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import safetensors.torch
import torch
from safetensors import SafetensorError

from fused_kv_llm.errors import StoreFullError
from fused_kv_llm.store.damage import warn
from fused_kv_llm.store.parts import StoreParts

__all__ = ["References"]

_PREFIX = "reference:"


class References:
    """The reference KV of a store's identities, ``KVStore.references``; encrypted where the store is.

    Parameters
    ----------
    parts : StoreParts
        The store's.
    """

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts

    def read(self, identity: str) -> dict[str, torch.Tensor] | None:
        """Return the reference of an identity.

        Parameters
        ----------
        identity : str
            ``KVIdentity.digest``.

        Returns
        -------
        dict of str to Tensor, or None
            On the CPU. None if there is none, or it is damaged: then it is deleted, with a ``FusedKVWarning``.
        """
        self._parts.check_open()
        records = self._parts.index.records
        try:
            data = records.read(_PREFIX + identity)
            return None if data is None else safetensors.torch.load(data)
        except (ValueError, SafetensorError) as error:
            warn(
                f"The reference KV of {identity[:16]} in {self._parts.folder.root} is damaged ({error}). Until it is "
                "written again, nothing tells whether the model still computes what is stored."
            )
            self.remove(identity)
            return None

    def add(self, identity: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a reference, unless there is one; does nothing in a read-only store, or one that is full.

        Parameters
        ----------
        identity : str
            ``KVIdentity.digest``.
        tensors : mapping of str to Tensor
            Small ones.
        """
        self._parts.check_open()
        if not self._parts.read_only:
            data = safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
            # A store without room for it can still be read.
            with suppress(StoreFullError):
                self._parts.index.records.add(_PREFIX + identity, data)

    def remove(self, identity: str) -> None:
        """Delete a reference; does nothing in a read-only store."""
        self._parts.check_open()
        if not self._parts.read_only:
            self._parts.index.records.remove(_PREFIX + identity)
