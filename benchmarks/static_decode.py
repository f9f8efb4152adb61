"""Decoding with shapes that never change, which a CUDA graph can record: measured before the engine is to do it.

A decoding step of the engine sees one key more than the last one, so its launches differ from step to step. Here every
step sees the cache's whole capacity; the kernel reads the row's position from the device's memory and stops there, so
that what lies behind is never read and one recording serves all steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_kv_llm.model import ForwardPass, LoadedModel
from fused_kv_llm.model.seam import run_model

__all__ = ["StaticDecoder"]

_WARM_UPS = 3


class StaticDecoder:
    """Computes one token after another of a fused prompt.

    Parameters
    ----------
    loaded : LoadedModel
    prompt : FusedPrompt
        Not decoded any other way from now on; prefilled with room for the tokens to come.
    graph : bool
        Whether to record a step in a CUDA graph and replay it; the device is CUDA's then.
    """

    def __init__(self, loaded: LoadedModel, prompt: Any, graph: bool) -> None:
        cache = prompt.cache
        self._loaded, self._cache = loaded, cache
        self._capacity = int(cache.keys.shape[3])
        self._ids = torch.zeros(1, 1, dtype=torch.int64, device=loaded.device)
        self._position = torch.full((1,), cache.length, device=loaded.device)
        # The pass keeps the tensor itself: what is written into it later is what the kernel reads.
        self._pass = ForwardPass(self._position, self._capacity)
        self._recorded = self._record() if graph else None

    def _step(self) -> Tensor:
        with torch.inference_mode():
            # What looks at numbers would wait for the device, and cannot be recorded.
            return run_model(self._loaded.model, self._ids, self._position, self._cache, self._pass)[0].float()

    def _record(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # Kernels are tuned and memory is found on the way; what these steps write, the first real step overwrites.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._step()
        return graph, logits

    def append(self, token: int) -> Tensor:
        """Compute a token; return the logits after it, float32 ``[vocabulary]``, valid until the next call."""
        if self._cache.length >= self._capacity:
            raise ValueError(f"the cache has room for {self._capacity} tokens: prefill with more max_tokens")
        self._ids.fill_(token)
        self._position.fill_(self._cache.length)
        self._cache.length += 1
        if self._recorded is None:
            return self._step()[-1]
        graph, logits = self._recorded
        graph.replay()
        return logits[-1]
