"""A prompt whose KV is complete: what fusion gives and decoding goes on with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_llm.model import ForwardPass, FusedCache, LoadedModel, forward_rows

from .kept_prompt import KeptPrompt

__all__ = ["FusedPrompt"]


@dataclass(slots=True)
class FusedPrompt:
    """A prompt whose KV is complete.

    Parameters
    ----------
    cache : FusedCache
        KV of the whole prompt, with room for the answer.
    logits : Tensor
        float32 ``[vocabulary]``: the next token's.
    selected : Tensor
        int64 positions of the chunk tokens that were recomputed, ascending.
    text : str
        The rendered prompt.
    kept : KeptPrompt
        What later prompts may use of its KV.
    """

    cache: FusedCache
    logits: Tensor
    selected: Tensor
    text: str
    kept: KeptPrompt

    def append(self, loaded: LoadedModel, token_ids: list[int]) -> Tensor:
        """Compute further tokens after the prompt.

        Parameters
        ----------
        loaded : LoadedModel
        token_ids : list of int
            The next tokens: one while decoding, several to score a given answer.

        Returns
        -------
        Tensor
            float32 ``[len(token_ids), vocabulary]``, the logits after each of them.
        """
        cache, count = self.cache, len(token_ids)
        positions = torch.arange(cache.length, cache.length + count, device=loaded.device)
        cache.length += count
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=loaded.device)
            return forward_rows(loaded, ids, positions, cache, ForwardPass(positions, cache.length))
