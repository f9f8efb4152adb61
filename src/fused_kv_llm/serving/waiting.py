"""The requests that wait: which comes next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from .served_request import ServedRequest

__all__ = ["WaitingRequests"]

# Prompts that wait tokenised, which takes some memory.
_MOST_MEASURED = 128


class WaitingRequests:
    """Requests in the order in which they are served; used by one thread.

    Higher priorities come first. Among equals, tenants take turns by the tokens that they have been served (a virtual
    counter, as fair queueing has it). A tenant that comes anew or after a pause starts where the one stood that was
    served last: what it did not use is not saved up.

    Of a tenant's requests, the one comes first that has the most cached tokens for each that is to be computed
    (RAGCache section 5.2). It is answered soonest, and what is cached is used before it makes room. One that waits is
    overtaken ``reorder_window`` times at most.
    """

    def __init__(self) -> None:
        self._requests: list[ServedRequest] = []
        self._served: Counter[str] = Counter()
        self._level = 0

    def add(self, request: ServedRequest) -> None:
        """Append a request."""
        tenant = request.home.tenant
        if all(other.home.tenant != tenant for other in self._requests):
            self._served[tenant] = max(self._served[tenant], self._level)
        self._requests.append(request)

    def take(self) -> ServedRequest | None:
        """Take out the request that comes next; None if there is none."""
        first = min(self._requests, key=self._rank, default=None)
        request = None if first is None else self._before(first)
        if request is not None:
            self._requests.remove(request)
            self._level = max(self._level, self._served[request.home.tenant])
            self.charge(request, request.max_tokens)
        return request

    def unmeasured(self) -> ServedRequest | None:
        """Return the next request of which it is not known how much is cached; None if all that matter are."""
        for request in islice(self._requests, _MOST_MEASURED):
            if request.cached_ratio is None and request.home.limits.reorder_window:
                return request
        return None

    def _before(self, first: ServedRequest) -> ServedRequest:
        """Return the request that goes first of those with its tenant and priority; count whom it overtakes."""
        peers = [one for one in self._requests if _group(one) == _group(first)]
        request = first
        if first.overtaken < first.home.limits.reorder_window:
            request = max(peers, key=lambda one: (one.cached_ratio or 0.0, -one.arrived_s))
        for other in peers:
            other.overtaken += other.arrived_s < request.arrived_s
        return request

    def charge(self, request: ServedRequest, num_tokens: int) -> None:
        """Note what a tenant is served."""
        self._served[request.home.tenant] += num_tokens

    def remove(self, request: ServedRequest) -> bool:
        """Take out a request that is given up; return whether it was there."""
        if request not in self._requests:
            return False
        self._requests.remove(request)
        return True

    def __iter__(self) -> Iterator[ServedRequest]:
        """Iterate over a copy, in the order of arrival."""
        return iter(list(self._requests))

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._requests)

    def _rank(self, request: ServedRequest) -> tuple[int, int, float]:
        return -request.terms.priority, self._served[request.home.tenant], request.arrived_s


def _group(request: ServedRequest) -> tuple[int, str]:
    return request.terms.priority, request.home.tenant
