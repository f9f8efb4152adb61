"""The requests that wait: which comes next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .served_request import ServedRequest

__all__ = ["WaitingRequests"]


class WaitingRequests:
    """Requests in the order in which they are served; used by one thread.

    Higher priorities come first. Among equals, tenants take turns by the tokens that they have been served (a virtual
    counter, as fair queueing has it), and a tenant's requests keep their order. A tenant that comes anew or after a
    pause starts where the one stood that was served last: what it did not use is not saved up.
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
        request = min(self._requests, key=self._rank, default=None)
        if request is not None:
            self._requests.remove(request)
            self._level = max(self._level, self._served[request.home.tenant])
            self.charge(request, request.max_tokens)
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
