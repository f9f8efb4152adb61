"""From token ids to text, a piece at a time, ending before stop strings."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream

__all__ = ["TextStream"]


class TextStream:
    """Decodes tokens as they come.

    A piece is held back while it might be the beginning of a stop string, so that no part of one is ever shown.
    Incomplete multi-byte characters wait for their remaining bytes.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerFast
    stop : tuple of str
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take a token and return the text that may be shown now; sets `stopped` when a stop string is complete."""
        self._held += self._decoder.step(self._backend, token_id) or ""
        found = [self._held.find(s) for s in self._stop if s in self._held]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((self._overlap(s) for s in self._stop), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Return what was held back; call it when the answer ends without a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
