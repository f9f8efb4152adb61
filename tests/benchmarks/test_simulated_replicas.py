"""Replicas in the simulation: the router's own placement, every question answered once, residence by routing."""

from __future__ import annotations

from simulation.hardware import GB
from simulation.predict import setup
from simulation.replicas import SimulatedReplicas, sections

SETUP = setup("7B", "fused", host_bytes=12 * GB, disk_bytes=1000 * GB)


def simulated(count: int, routing: str) -> SimulatedReplicas:
    trace = sections(0.7, 200, 80 * count, 1.0 * count, answer_tokens=4)
    made = SimulatedReplicas(SETUP, trace, count, routing, warm_up=30 * count)
    made.open_loop()
    made.close()
    return made


def test_every_question_is_answered_once() -> None:
    replicas = simulated(2, "chunks")
    answered = [request for engine in replicas.engines.values() for request in engine.requests]
    assert len(answered) == 160
    assert all(len(request.token_s) == 4 for request in answered)
    assert set(replicas.loads.values()) == {0}
    assert sum(replicas.sent.values()) == 100


def test_routing_by_chunk_finds_more_in_memory() -> None:
    assert simulated(2, "chunks").tiers()["memory"] > 1.2 * simulated(2, "random").tiers()["memory"]


def test_no_replica_gets_everything() -> None:
    assert max(simulated(2, "chunks").sent.values()) < 75
