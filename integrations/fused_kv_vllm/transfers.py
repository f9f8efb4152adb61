"""What the scheduler asks of the worker in a step: which spans to load, and which to store."""

from __future__ import annotations

from dataclasses import dataclass

from fused_kv_vllm.spans import PrefixSpan

__all__ = ["LoadRequest", "SpanBlocks", "Transfers"]


@dataclass(frozen=True, slots=True)
class SpanBlocks:
    """A span and the blocks of its tokens.

    Parameters
    ----------
    span : PrefixSpan
    blocks : tuple of int
        Where its tokens are in the caches; fewer than it has if the first ones are there already. The last block may
        have room for more tokens.
    skipped : int
        How many of its first blocks these are.
    """

    span: PrefixSpan
    blocks: tuple[int, ...]
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What is to be loaded for a request before it is computed; spans in their order."""

    request_id: str
    spans: tuple[SpanBlocks, ...]


@dataclass(frozen=True, slots=True)
class Transfers:
    """What a worker does in a step.

    Parameters
    ----------
    loads : tuple of LoadRequest
        Begun beside the step's forward.
    saves : tuple of SpanBlocks
        Complete after the step's forward.
    is_idle : bool
        Whether nothing is computed in the step.
    """

    loads: tuple[LoadRequest, ...] = ()
    saves: tuple[SpanBlocks, ...] = ()
    is_idle: bool = False
