"""A prompt cut into spans of tokens, each named after everything that its exact KV depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["PrefixSpan", "prefix_spans"]


@dataclass(frozen=True, slots=True)
class PrefixSpan:
    """Some tokens of a prompt, and the name of their KV.

    Parameters
    ----------
    key : str
        SHA-256 of the identity and of all tokens from the first one of the prompt to the last one here, hexadecimal.
    identity : str
        ``KVIdentity.digest``.
    start : int
        Position of the first token.
    token_ids : tuple of int
        The tokens.
    is_handed : bool
        Whether an engine has handed it over, so that its KV is not laid out as vLLM's blocks, and may be fused.
    """

    key: str
    identity: str
    start: int
    token_ids: tuple[int, ...]
    is_handed: bool = False

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.token_ids)


def prefix_spans(identity: str, token_ids: Sequence[int], span_tokens: int) -> list[PrefixSpan]:
    """Cut a prompt into spans.

    Parameters
    ----------
    identity : str
        ``KVIdentity.digest``.
    token_ids : sequence of int
        The prompt's, from its first token.
    span_tokens : int
        Tokens of each span.

    Returns
    -------
    list of PrefixSpan
        In their order. Tokens at the end that do not fill a span are in none. Every key depends on the key before it,
        so two spans have one key only if all tokens before them are the same.
    """
    spans, chain = [], hashlib.sha256(f"{identity}|{span_tokens}".encode())
    for start in range(0, len(token_ids) - span_tokens + 1, span_tokens):
        ids = tuple(token_ids[start : start + span_tokens])
        chain.update(np.asarray(ids, dtype="<i8").tobytes())
        spans.append(PrefixSpan(chain.hexdigest(), identity, start, ids))
    return spans
