"""The alternative path to a chunk's KV (FusionRAG section 4.1): out of the tree of answered prompts, not by a prefill.

A chunk that no ingestion has seen is computed by the first prompt that contains it. Where a later prompt has it behind
other chunks, the path "header, other chunks, chunk" is not in the tree. The paper leaves out earlier chunks of the path
until what is left is found. Here the shortest path, "header, chunk", is the only one that is looked for: what stands
there was computed with the same tokens before it as by an ingestion, so it is the chunk's KV and becomes its one copy.
KV behind anything else depends on that, on other chunks or on somebody's instructions, and stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.kv import PrefixTree
from fused_kv_llm.model import LoadedModel, PrefixKV

__all__ = ["AlternativePath"]


class AlternativePath:
    """Finds chunks' KV in the tree of one engine.

    Parameters
    ----------
    tree : PrefixTree
        What answered prompts have left. It is of one tenant and one model.
    loaded : LoadedModel
    header : PrefixKV
        What stands before every chunk when it is ingested, ``P`` tokens.
    """

    def __init__(self, tree: PrefixTree, loaded: LoadedModel, header: PrefixKV) -> None:
        self._tree, self._loaded, self._header = tree, loaded, header

    def find(self, token_ids: Sequence[int]) -> ChunkKV | None:
        """Return a copy of a chunk's KV.

        Parameters
        ----------
        token_ids : sequence of int
            The chunk's stand-alone ids, ``T`` of them.

        Returns
        -------
        ChunkKV or None
            At position ``P``, in the model's dtype on its device, equal to that of a prefill but for rounding. None if
            no prompt has left all of it right behind the header, or what is there is not exact or not a number.

        Raises
        ------
        ModelChangedError
            If the model is no longer the one that has answered.
        """
        home, path = len(self._header.token_ids), [*self._header.token_ids, *token_ids]
        # Most chunks are not there, and to look for them is no use of what is.
        if not token_ids or self._tree.known_tokens(path, None) < len(path):
            return None
        self._loaded.check_unchanged()
        match = self._tree.match(path, None)
        try:
            if match.num_tokens < len(path):
                return None
            heads, *dims = self._loaded.geometry.room
            layers, like = self._loaded.geometry.num_layers, self._header.keys
            keys, values = (
                torch.empty(layers, heads, len(path), dim, dtype=self._loaded.dtype, device=like.device) for dim in dims
            )
            match.write(keys, values, len(path))
        finally:
            match.release()
        keys, values = keys[:, :, home:].contiguous(), values[:, :, home:].contiguous()
        if not bool(keys.isfinite().all() and values.isfinite().all()):
            return None
        return ChunkKV(keys, values, tuple(token_ids), home)
