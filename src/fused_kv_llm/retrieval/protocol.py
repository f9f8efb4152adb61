"""What a search that answers in stages looks like, and how two searches make one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from fused_kv_llm.errors import ConfigError

__all__ = ["QuickFirst", "StagedSearch", "last_of"]

T = TypeVar("T")


@runtime_checkable
class StagedSearch(Protocol):
    """A search that says what it has found so far.

    Retrievers of both frameworks may implement it beside their own methods. The results of a stage are what the search
    would return if it ended there, best first; those of the last stage are the search's result.
    """

    def stages(self, query: Any) -> Iterator[list[Any]]:
        """Yield the results of every stage, of at least one; the last ones are final."""


class QuickFirst:
    """A quick search whose results are provisional, and a slow one whose results are final.

    For a remote vector store with a small copy nearby, a cache of earlier results, or a reranker that mostly agrees
    with what it ranks.

    Parameters
    ----------
    quick : callable
        Maps a query to a list of results. If it fails the slow search goes on without it.
    slow : callable
        Maps a query to the list of results that counts.

    Examples
    --------
    >>> search = QuickFirst(lambda query: ["near"], lambda query: ["nearest"])
    >>> list(search.stages("Where?"))
    [['near'], ['nearest']]
    """

    def __init__(self, quick: Callable[[Any], Iterable[Any]], slow: Callable[[Any], Iterable[Any]]) -> None:
        self._quick, self._slow = quick, slow

    def stages(self, query: Any) -> Iterator[list[Any]]:
        """Yield the quick search's results, and then the slow one's.

        Yields
        ------
        list
        """
        try:
            first = list(self._quick(query))
        except Exception:
            # It only saves time. The slow search says what is wrong, if it concerns it.
            first = []
        if first:
            yield first
        yield list(self._slow(query))


def last_of(stages: Iterable[T]) -> T:
    """Return the final results of a staged search.

    Raises
    ------
    ConfigError
        If there was no stage.
    """
    last: list[T] = []
    for found in stages:
        last = [found]
    if not last:
        raise ConfigError("The staged search ended without results: stages() yields a list at least once, maybe empty")
    return last[0]
