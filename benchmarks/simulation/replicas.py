"""Several replicas on one simulated clock, behind the placement that the real router uses.

    PYTHONPATH=benchmarks python -m simulation.replicas

Simulates 1 to 64 replicas, with routing by chunk and with random routing, into
``benchmarks/results/simulation_replicas.json``. The hardware is assumed; nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import simpy
from rich.console import Console
from rich.table import Table

from fused_kv_llm.scale.placement import Held, Part, Placement, PlacementOptions, RoutingKey

from .engine import Setup, SimulatedEngine
from .hardware import GB
from .predict import setup
from .report import times
from .request import SimulatedRequest
from .trace import Asked, Trace, poisson, zipf

__all__ = ["COUNTS", "SimulatedReplicas", "run", "sections"]

RESULTS = Path(__file__).parents[1] / "results" / "simulation_replicas.json"
COUNTS = (1, 2, 4, 8, 16, 32, 64)
CHUNKS, RATE_PER_REPLICA = 2000, 1.0
# A replica's memory holds about one chunk in twelve, its disk a third; the shared store has all of them.
MACHINE: dict[str, Any] = {"host_bytes": 50 * GB, "disk_bytes": 200 * GB}
_SECTION = 8


class SimulatedReplicas:
    """Answers a trace with several engines.

    Parameters
    ----------
    one : Setup
        Of each replica.
    trace : Trace
    count : int
    routing : {"chunks", "random"}
    options : PlacementOptions or None
    period_s : float
        Seconds from one publication of what a replica holds to the next.
    warm_up : int
        Hits are counted from this question on.
    """

    def __init__(
        self,
        one: Setup,
        trace: Trace,
        count: int,
        routing: str = "chunks",
        options: PlacementOptions | None = None,
        period_s: float = 1.0,
        warm_up: int = 0,
    ) -> None:
        self.env, self.trace = simpy.Environment(), trace
        self.engines = {f"replica-{number}": SimulatedEngine(one, trace, -1, self.env) for number in range(count)}
        self.placement = Placement(options, now_s=lambda: float(self.env.now), seed=0)
        self.loads = dict.fromkeys(self.engines, 0.0)
        self.sent: Counter[str] = Counter()
        self._is_random, self._random = routing == "random", random.Random(0)
        self._period_s, self._warm_up = period_s, warm_up

    def open_loop(self) -> list[SimulatedRequest]:
        """Answer every question when it comes, and return the requests in the order in which they came."""
        for engine in self.engines.values():
            engine.start()
        self.env.process(self._publishing())
        self.env.run(self.env.process(self._arrivals()))
        found = [request for engine in self.engines.values() for request in engine.requests]
        return sorted(found, key=lambda request: request.arrived_s)

    def tiers(self) -> dict[str, float]:
        """Return the share of chunks by the tier they were opened in, over all replicas."""
        hits: Counter[str] = Counter()
        for engine in self.engines.values():
            hits.update(engine.tiers.hits if engine.tiers is not None else {})
        total = sum(hits.values())
        return {tier: count / total for tier, count in sorted(hits.items())}

    def close(self) -> None:
        """Give temporary files back."""
        for engine in self.engines.values():
            engine.close()

    def _arrivals(self) -> Generator[simpy.Event, None, None]:
        answered = []
        for number, asked in enumerate(self.trace.asked):
            yield self.env.timeout(max(0.0, asked.at_s - self.env.now))
            if number == self._warm_up:
                self.sent.clear()
                for engine in self.engines.values():
                    engine.count_anew()
            answered.append(self.env.process(self._answer(asked)))
        yield self.env.all_of(answered)

    def _answer(self, asked: Asked) -> Generator[simpy.Event, None, None]:
        key = self._key(asked)
        name = self._random.choice(list(self.engines)) if self._is_random else self.placement.rank(key, self.loads)[0]
        self.placement.routed(name, key)
        self.sent[name] += 1
        self.loads[name] += 1
        yield self.engines[name].submit(asked)
        self.loads[name] -= 1

    def _publishing(self) -> Generator[simpy.Event, None, None]:
        while True:
            for name, engine in self.engines.items():
                resident = engine.tiers.memory.chunks() if engine.tiers is not None else {}
                self.placement.update(name, Held(frozenset(int(key, 16) for key in resident)))
            yield self.env.timeout(self._period_s)

    def _key(self, asked: Asked) -> RoutingKey:
        tokens = self.trace.chunk_tokens
        return RoutingKey(self.trace.prompt_tokens(asked), tuple(Part(chunk, tokens[chunk]) for chunk in asked.chunks))


def sections(
    exponent: float, chunks: int, requests: int, rate_per_s: float, k: int = 4, seed: int = 1, **tokens: int
) -> Trace:
    """Return questions about sections of eight chunks, `k` chunks of a section each; sections follow Zipf's law."""
    like = zipf(exponent, chunks, 1, 1.0, seed=seed)
    drawn, count = random.Random(seed), chunks // _SECTION
    places = list(range(count))
    drawn.shuffle(places)
    weights = [1 / (rank + 1) ** exponent for rank in range(count)]
    sizes = {"question_tokens": 64, "answer_tokens": 32} | tokens
    asked = []
    for at_s in poisson(requests, rate_per_s, seed):
        (place,) = drawn.choices(places, weights)
        chosen = tuple(_SECTION * place + one for one in drawn.sample(range(_SECTION), k))
        asked.append(Asked(chosen, at_s=at_s, **sizes))
    return Trace(asked, like.chunk_tokens)


def run(trace: Trace, count: int, routing: str, one: Setup | None = None) -> dict[str, Any]:
    """Simulate a trace, and return what came of its second half."""
    warm_up = len(trace.asked) // 2
    replicas = SimulatedReplicas(one or setup("7B", "fused", **MACHINE), trace, count, routing, warm_up=warm_up)
    found = times(replicas.open_loop(), warm_up)
    hits = replicas.tiers()
    replicas.close()
    busiest = max(replicas.sent.values()) * count / sum(replicas.sent.values())
    return {**found, "resident": hits.get("memory", 0.0), "tiers": hits, "busiest_over_mean": busiest}


def predictions(counts: Sequence[int], each: int) -> Iterator[dict[str, Any]]:
    """Yield figures for so many replicas, at a rate that grows with them."""
    for name in ("sections", "independent"):
        for count in counts:
            requests, rate = each * count, RATE_PER_REPLICA * count
            if name == "sections":
                trace = sections(0.8, CHUNKS, requests, rate)
            else:
                trace = zipf(0.8, CHUNKS, requests, rate, k=4, answer_tokens=32)
            for routing in ("random", "chunks"):
                began_s = time.perf_counter()
                found = run(trace, count, routing)
                Console(stderr=True).print(name, routing, count, f"{time.perf_counter() - began_s:.0f} s")
                yield {"trace": name, "routing": routing, "replicas": count, **found}


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("trace", "routing", "replicas", "resident", "ttft mean, s", "p95, s", "answers/s", "busiest/mean",
                  title="replicas (simulated)")  # fmt: skip
    for row in rows:
        table.add_row(row["trace"], row["routing"], str(row["replicas"]), f"{row['resident']:.1%}",
                      f"{row['ttft_mean_s']:.3f}", f"{row['ttft_p95_s']:.3f}", f"{row['requests_per_s']:.2f}",
                      f"{row['busiest_over_mean']:.2f}")  # fmt: skip
    return table


def main() -> None:
    """Simulate, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="of replicas")
    parser.add_argument("--each", type=int, default=100, help="questions for each replica")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    one = setup("7B", "fused", **MACHINE)
    record: dict[str, Any] = {
        "note": "Simulated, from assumed hardware. Nothing here was measured.",
        "assumed": {"shape": asdict(one.shape), "hardware": asdict(one.hardware), "costs": one.costs.to_dict()},
        "placement": asdict(PlacementOptions()),
        "trace": {"chunks": CHUNKS, "zipf_exponent": 0.8, "chunks_each": 4, "section": _SECTION,
                  "rate_per_replica_per_s": RATE_PER_REPLICA, "requests_per_replica": args.each},
        "replicas": [],
    }  # fmt: skip
    for row in predictions(args.counts, args.each):
        record["replicas"].append(row)
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    Console().print(_table(record["replicas"]))


if __name__ == "__main__":
    main()
