"""A prompt as the model gets it, before anything is known of what is stored."""

from __future__ import annotations

from dataclasses import dataclass

from fused_kv_llm.prompt import Encoded

__all__ = ["ReadPrompt"]


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrompt:
    """A prompt's text and tokens, which do not depend on what is stored.

    Parameters
    ----------
    text : str
        As the model gets it.
    encoded : Encoded
    """

    text: str
    encoded: Encoded

    @property
    def ids(self) -> list[int]:
        """Its token ids."""
        return self.encoded.ids
