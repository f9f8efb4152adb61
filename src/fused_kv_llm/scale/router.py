"""Ray Serve's request router that asks :class:`.placement.Placement`; importing this module imports Ray."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    LocalityMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from .placement import Placement, PlacementOptions, RoutingKey
from .routing_stats import held_of, load_of

__all__ = ["ChunkRouter", "RandomRouter"]


class ChunkRouter(LocalityMixin, RequestRouter):
    """Sends a request where its chunks and its conversation are, see :class:`.placement.Placement`.

    A request without a routing key goes to the least busy replica. A replica that is full is passed over for the next
    best one. Requests are matched to replicas by their own id, so `FIFOMixin` is not among the bases.
    """

    def initialize_state(self, **options: Any) -> None:
        """Take the options of :class:`.placement.PlacementOptions`."""
        self._placement = Placement(PlacementOptions(**options))
        # By replica, the stats that were understood last: they come as a new object when they change.
        self._understood: dict[str, Any] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, each a rank of its own."""
        if pending_request is not None:
            # After all replicas have refused, Ray waits before it asks again.
            pending_request.routing_context.should_backoff = True
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        for name, replica in named.items():
            self._understand(name, replica.routing_stats)
        loads = {name: self._load(replica) for name, replica in named.items()}
        return [[named[name]] for name in self._placement.rank(_key_of(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember where a request went."""
        self._placement.routed(replica_id.unique_id, _key_of(pending_request))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that are gone."""
        names = {replica.replica_id.unique_id for replica in replicas}
        self._placement.keep(names)
        self._understood = {name: stats for name, stats in self._understood.items() if name in names}
        super().update_replicas(replicas)

    def _understand(self, name: str, stats: dict[str, Any]) -> None:
        if stats and self._understood.get(name) is not stats:
            self._understood[name] = stats
            self._placement.update(name, held_of(stats))

    def _load(self, replica: RunningReplica) -> float:
        """Return what this router has sent to a replica and has not come back, or what the replica says."""
        counted = self.replica_queue_len_cache.get(replica.replica_id)
        return load_of(replica.routing_stats) if counted is None else float(counted)


class RandomRouter(FIFOMixin, LocalityMixin, RequestRouter):
    """Sends requests anywhere, to compare with."""

    def initialize_state(self, **options: Any) -> None:
        """Take what :class:`ChunkRouter` takes, and need none of it."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in an order that is drawn."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[one] for one in random.sample(candidate_replicas, len(candidate_replicas))]


def _key_of(pending: PendingRequest | None) -> RoutingKey:
    """Return the key among a request's arguments."""
    given = () if pending is None else (*pending.args, *pending.kwargs.values())
    return next((one for one in given if isinstance(one, RoutingKey)), RoutingKey(0))
