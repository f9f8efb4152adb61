"""The KV that running requests hold: whether one more has room, and whether one that is complete should share.

A private copy is what a request decodes fastest over, so requests keep theirs while there is room. Sharing saves memory
once several see the same chunks: the pages of one request's chunks take more than its copy, since they have the tokens
that it has recomputed and the context shifts as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from fused_kv_llm.online import Sharing

from .served_request import ServedRequest

__all__ = ["RunningKV"]

_ROOMY = 0.5


class RunningKV:
    """What the requests of a model hold of ``kv_pool_bytes``.

    Parameters
    ----------
    running, ready : collection of ServedRequest
        Those that hold KV, and those that may begin next; looked at whenever something is asked.
    """

    def __init__(self, running: Collection[ServedRequest], ready: Collection[ServedRequest]) -> None:
        self._running, self._ready = running, ready

    @property
    def nbytes(self) -> int:
        """Bytes that the running requests hold: what each has for itself, and every page once."""
        pools = {id(pages): pages for one in self._running if (pages := one.home.context.pages) is not None}
        return sum(one.kv_nbytes for one in self._running) + sum(pages.nbytes for pages in pools.values())

    def has_room(self, request: ServedRequest) -> bool:
        """Whether one more may begin; it is fused in a private copy."""
        return self.nbytes + request.kv_nbytes <= request.home.limits.pool_bytes

    def wants_shared(self, request: ServedRequest, sharing: Sharing | None) -> bool:
        """Whether a running request whose prompt is complete should share its chunks' pages.

        Parameters
        ----------
        request : ServedRequest
        sharing : Sharing or None
            What that brings; None if it cannot be done, and the question is only whether that is worth a word.
        """
        how = request.home.limits.share_chunk_kv
        if how != "auto":
            return how == "always"
        return self._is_tight(request) and (sharing is None or self._saves(request, sharing))

    def _is_tight(self, request: ServedRequest) -> bool:
        most, held = request.home.limits.pool_bytes, self.nbytes
        following = next((one.kv_nbytes for one in self._ready), 0)
        return held > _ROOMY * most or held + following > most

    def _saves(self, request: ServedRequest, sharing: Sharing) -> bool:
        """Whether sharing saves memory once waiting requests use the pages too, and fits into the pool until then."""
        saved, pages = request.kv_nbytes - sharing.own_nbytes, sharing.new_pages()
        users = Counter(key for one in self._ready for key in one.chunk_keys)
        in_the_end = sum(nbytes / (1 + users[key]) for key, nbytes in pages.items())
        most = max(self.nbytes, request.home.limits.pool_bytes)
        return saved > in_the_end and self.nbytes - saved + sum(pages.values()) <= most
