"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from fused_kv_llm.config import GenerationConfig

__all__ = ["Constraint", "TokenSampler"]

Constraint = Callable[[Sequence[int], Tensor], Tensor]
"""From the answer's token ids so far and the logits ``[vocabulary]`` to the logits to choose from."""


class TokenSampler:
    """Greedy or sampled choice; a request has its own random state, so requests cannot disturb each other.

    Parameters
    ----------
    config : GenerationConfig
    device : torch.device
    """

    def __init__(self, config: GenerationConfig, device: torch.device) -> None:
        self._greedy = config.temperature == 0.0
        self._warpers = LogitsProcessorList()
        self._generator = torch.Generator(device=device)
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(config.temperature)))
            if config.top_p < 1.0:
                self._warpers.append(TopPLogitsWarper(config.top_p))

    def choose(self, logits: Tensor) -> int:
        """Return a token id for logits ``[vocabulary]``."""
        if self._greedy:
            return int(logits.argmax())
        warped = self._warpers(None, logits[None])
        return int(torch.multinomial(warped.softmax(dim=-1)[0], 1, generator=self._generator))
