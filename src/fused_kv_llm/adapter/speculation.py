"""A staged search beside a model that computes on suspicion, whichever framework's objects are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from fused_kv_llm.retrieval import last_of

from .model import FusedKVModel

__all__ = ["search_staged"]

T = TypeVar("T")


def search_staged(
    llm: FusedKVModel,
    stages: Iterable[Sequence[T]],
    texts_of: Callable[[Sequence[T]], Sequence[str]],
    prompt_of: Callable[[Sequence[T]], object] | None,
) -> Sequence[T]:
    """Take the stages of a search; load and compute what they find until the last one has come.

    While the engine answers others, nothing is done before the last stage.

    Parameters
    ----------
    llm : FusedKVModel
    stages : iterable of sequences
        Provisional results, the last ones final; computed in this thread as they are taken.
    texts_of : callable
        The texts of results, whose KV is loaded.
    prompt_of : callable or None
        The prompt that results will be asked with; None loads only.

    Returns
    -------
    sequence
        The final results.

    Raises
    ------
    ConfigError
        If there is no stage.
    """
    with ExitStack() as entered:
        speculation = None if prompt_of is None else entered.enter_context(llm.speculate())

        def tried() -> Iterable[Sequence[T]]:
            for found in stages:
                if found and not llm.engine.is_busy:
                    llm.prefetch(texts_of(found))
                if found and speculation is not None and prompt_of is not None:
                    speculation.propose(prompt_of(found))  # type: ignore[arg-type]
                yield found

        found = last_of(tried())
        if found and speculation is not None and prompt_of is not None:
            speculation.finish(prompt_of(found))  # type: ignore[arg-type]
        return found
