"""Chunks that have no KV, remembered until a prompt contains them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["ExpectedChunks"]

_MOST_TEXTS = 4096


class ExpectedChunks:
    """Texts that are expected in prompts; the oldest of too many are forgotten. Not thread-safe."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, None] = OrderedDict()

    def add(self, texts: Iterable[str]) -> None:
        """Remember texts, as the newest."""
        for text in texts:
            self._texts[text] = None
            self._texts.move_to_end(text)
        while len(self._texts) > _MOST_TEXTS:
            self._texts.popitem(last=False)

    def forget(self, texts: Iterable[str]) -> None:
        """Expect texts no more."""
        for text in texts:
            self._texts.pop(text, None)

    def take(self, prompt_text: str) -> list[str]:
        """Return the texts that a prompt contains verbatim, and forget them."""
        present = [text for text in self._texts if text and text in prompt_text]
        self.forget(present)
        return present
