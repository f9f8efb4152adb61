"""What a request holds once its prompt is complete: the prompt's KV, and the answer that is written behind it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fused_kv_llm.config import GenerationConfig
from fused_kv_llm.decoding import Constraint
from fused_kv_llm.model import ForwardPass, FusedCache, LoadedModel, RaggedPart, ViewCache
from fused_kv_llm.online import AnswerWriter, FusedPrompt, KeptPrompt, Piece
from fused_kv_llm.report import FusionReport

__all__ = ["WrittenAnswer"]


class WrittenAnswer:
    """A complete prompt's KV and the answer behind it; the answer stays when the KV is given back to begin anew.

    Parameters
    ----------
    loaded : LoadedModel

    Attributes
    ----------
    prompt : FusedPrompt or None
        None while the prompt is not complete.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.prompt: FusedPrompt | None = None
        self._writer: AnswerWriter | None = None

    @property
    def has_begun(self) -> bool:
        """Whether an answer was begun, behind this prompt's KV or behind KV that was given back."""
        return self._writer is not None

    def begin(
        self, config: GenerationConfig, report: FusionReport, started_s: float, constraint: Constraint | None
    ) -> None:
        """Begin an answer, no longer than there is room for; :class:`.AnswerWriter` has the parameters."""
        cache = self._complete.cache
        room = cache.get_max_length() - cache.length
        config = replace(config, max_tokens=min(room, config.max_tokens))
        self._writer = AnswerWriter(self._loaded, config, report, started_s, constraint)

    def write(self, logits: Tensor) -> Piece:
        """Choose the next token by its logits, ``[vocabulary]``."""
        return self._begun.write(logits)

    def next_part(self) -> RaggedPart:
        """Return the tokens without KV: the last one, or all that were sent before the request began anew."""
        prompt, device = self._complete, self._loaded.device
        start, stop = prompt.cache.length, self._num_tokens
        ids = torch.tensor(self._begun.token_ids[start - len(prompt.kept.ids) :], device=device)
        return RaggedPart(ids, prompt.cache, ForwardPass(torch.arange(start, stop, device=device), stop))

    def computed(self) -> None:
        """Note that every token has its KV."""
        self._complete.cache.length = self._num_tokens

    def kept(self) -> tuple[FusedCache, KeptPrompt] | None:
        """Return what later prompts may use; None once the prompt's chunks are shared: it was left before."""
        cache, kept = self._complete.cache, self._complete.kept
        if isinstance(cache, ViewCache):
            return None
        if self._writer is not None:
            kept = kept.with_answer(self._writer.token_ids[: cache.length - len(kept.ids)])
        return cache, kept

    def release(self) -> None:
        """Give the KV back."""
        prompt, self.prompt = self.prompt, None
        if prompt is not None:
            prompt.cache.release()

    @property
    def _num_tokens(self) -> int:
        return len(self._complete.kept.ids) + len(self._begun.token_ids)

    @property
    def _complete(self) -> FusedPrompt:
        if self.prompt is None:
            raise RuntimeError("the prompt has no KV yet, or it was given back")
        return self.prompt

    @property
    def _begun(self) -> AnswerWriter:
        if self._writer is None:
            raise RuntimeError("the answer has not begun yet")
        return self._writer
