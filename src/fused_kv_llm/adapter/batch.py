"""Several prompts of one call: they are answered at once, and their answers are taken in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import QueueFullError
from fused_kv_llm.serving import PieceStream

__all__ = ["stream_all"]

# Beyond those that are computed at once, so that their chunks are loaded meanwhile.
_AHEAD = 4


def stream_all(
    engine: FusedKVEngine, prompts: Sequence[str], options: dict[str, Any], expected: Sequence[Sequence[str]] = ()
) -> Generator[PieceStream]:
    """Yield the answers to prompts in their order, while the next ones are being computed.

    Parameters
    ----------
    engine : FusedKVEngine
        It is asked for as many at once as it computes, and a few more.
    prompts : sequence of str
    options : dict
        As :meth:`fused_kv_llm.FusedKVEngine.stream` takes them.
    expected : sequence of sequence of str
        The chunks that each prompt should contain; empty without.

    Yields
    ------
    PieceStream
        The caller closes it. Those that were not yielded yet are cancelled when the generator is closed.

    Raises
    ------
    QueueFullError
        If so many requests of others wait that the next prompt is not taken, and none of this call is under way.
    """
    ahead: deque[PieceStream] = deque()
    left = deque(zip(prompts, expected or [()] * len(prompts), strict=True))
    try:
        while left or ahead:
            while left and len(ahead) < engine.requests.limits.num_seqs + _AHEAD:
                try:
                    prompt, chunks = left[0]
                    ahead.append(engine.stream(prompt, **options, expected=chunks))
                except QueueFullError:
                    if not ahead:
                        raise
                    break
                left.popleft()
            yield ahead.popleft()
    finally:
        for stream in ahead:
            stream.close()
