"""Replacement policies on retrieval traces: how much of what is asked for is still there.

    python benchmarks/eviction.py --data ../shared/data

Traces: Zipf with exponents 0.8, 1.0 and 1.2 over chunks of 32 to 1,024 tokens, and the passages of three question files
in the order of their questions. Each is replayed twice.

chunks: the store, where a chunk is found wherever it stands. A hit saves computing it alone.
tree: the prefix tree, where a hit is a prefix of the documents of a request, in their order. It is the engine's own
tree, with one token id for 32 tokens; a request saves T(0, all) - T(found, rest).

T is measured by the engine's `PrefillCost` with the embedded model and interpolated, RAGCache's algorithm 1. Budgets
are shares of all chunks' tokens. look-ahead evicts what the queue of the next 500 chunks needs last, or does not need.
It knows the future, which no policy does. In the tree it takes no account of what stands behind a node.

Swapped bytes: the tree with a device level of 5 % and a host level of 40 %, with and without swap-out-only-once.
"""

from __future__ import annotations

import argparse
import json
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from environment import environment
from evaluation.questions import read_corpus

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.kv import HostLevel, PrefixRun, PrefixTree, RankedEviction
from fused_kv_llm.serving import loop_of
from fused_kv_llm.store import POLICIES, Entry, EvictionQueue, RecomputeCost

BUDGETS = (0.05, 0.1, 0.2, 0.4)
EXPONENTS = (0.8, 1.0, 1.2)
FILES = ("squad10", "hotpotqa_train100", "musique_train100")
AHEAD = "look-ahead"
QUEUE = 500
GRAIN_TOKENS = 32
NODE_NBYTES = 8


@dataclass(frozen=True, slots=True)
class Trace:
    """Documents by request, and the tokens of each document."""

    requests: list[list[int]]
    tokens: list[int]

    @property
    def total(self) -> int:
        """Tokens of all documents that are asked for."""
        return sum(self.tokens[one] for one in {one for request in self.requests for one in request})


def zipf_trace(exponent: float, chunks: int = 500, requests: int = 2500, k: int = 3) -> Trace:
    """Return requests of up to `k` chunks; popularity and length are independent."""
    rng = random.Random(1)
    lengths = [int(32 * 2 ** rng.uniform(0, 5)) for _ in range(chunks)]
    weights = [1 / (rank + 1) ** exponent for rank in range(chunks)]
    drawn = [list(dict.fromkeys(rng.choices(range(chunks), weights=weights, k=k))) for _ in range(requests)]
    return Trace(drawn, lengths)


def file_trace(path: Path) -> Trace:
    """Return the passages of a set's questions; a token is 4.2 characters, as SmolLM2 cuts English."""
    texts = {text: number for number, text in enumerate(read_corpus(path))}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    requests = [[texts[passage["text"]] for passage in record["passages"]] for record in records]
    return Trace(requests, [max(1, round(len(text) / 4.2)) for text in texts])


def replay_chunks(trace: Trace, policy: str, share: float, seconds: RecomputeCost) -> dict[str, float]:
    """Return the shares of chunks and of seconds that hits of the store save."""
    asked = [one for request in trace.requests for one in request]
    queue = EvictionQueue(POLICIES["lru"] if policy == AHEAD else POLICIES[policy])
    coming, used, budget = _places(asked), 0, share * trace.total
    here: set[int] = set()
    hits = saved = total = 0.0
    for now, one in enumerate(asked):
        cost, size = seconds(0, trace.tokens[one]), trace.tokens[one]
        total += cost
        if one in here:
            hits, saved = hits + 1, saved + cost
            queue.touch(str(one), now)
            continue
        while used + size > budget and here:
            gone = _needed_last(here, coming, now) if policy == AHEAD else int(queue.pop() or 0)
            here.remove(gone)
            used -= trace.tokens[gone]
        if used + size <= budget:
            queue.put(str(one), Entry(size, cost, used=now))
            here.add(one)
            used += size
    return {"hit_rate": hits / len(asked), "saved": saved / total}


def _places(asked: Sequence[int]) -> dict[int, list[int]]:
    places: dict[int, list[int]] = defaultdict(list)
    for place, one in enumerate(asked):
        places[one].append(place)
    return places


def _needed_last(here: set[int], coming: dict[int, list[int]], now: int) -> int:
    """Return what the queue needs last, or not at all: of those, the one used longest ago."""

    def distance(one: int) -> tuple[int, int]:
        places = coming[one]
        at = bisect_right(places, now)
        ahead = places[at] - now if at < len(places) else QUEUE + 1
        return min(ahead, QUEUE + 1), now - places[at - 1]

    return max(here, key=distance)


class LookAhead(RankedEviction):
    """Nodes whose document the queue needs next stay; others go by their last use."""

    def __init__(self, trace: Trace) -> None:
        super().__init__("lru")
        self._coming = _places([one for request in trace.requests for one in request])
        self.now = 0

    def rank(self, node: Any, level: int) -> tuple[float, float]:
        """Return when it is needed, the sooner the higher."""
        places = self._coming[int(node.ids[0]) // 64]
        at = bisect_right(places, self.now)
        ahead = places[at] - self.now if at < len(places) else QUEUE + 1
        return -float(min(ahead, QUEUE + 1)), super().rank(node, level)[1]


def replay_tree(
    trace: Trace, policy: str, share: float, seconds: RecomputeCost, host: HostLevel | None = None
) -> tuple[dict[str, float], PrefixTree]:
    """Return the shares of chunks and of seconds that prefixes save, and the tree."""
    rule = LookAhead(trace) if policy == AHEAD else RankedEviction(policy, _in_grains(seconds))
    tree = PrefixTree(int(share * trace.total / GRAIN_TOKENS) * NODE_NBYTES, rule, host)
    grains = [64 * one + np.arange(max(1, min(63, count // GRAIN_TOKENS))) for one, count in enumerate(trace.tokens)]
    hits = asked = 0
    saved = total = 0.0
    for request in trace.requests:
        ids = np.concatenate([grains[one] for one in request])
        match = tree.match(ids, None)  # type: ignore[arg-type]
        found, kv = match.num_tokens, torch.zeros(1, 1, len(ids), 1)
        match.release()
        tree.insert(ids, [PrefixRun(len(ids))], kv, kv, cached=found)  # type: ignore[arg-type]
        ends = np.cumsum([len(grains[one]) for one in request])
        hits, asked = hits + int((ends <= found).sum()), asked + len(request)
        total += (whole := seconds(0, len(ids) * GRAIN_TOKENS))
        saved += whole - seconds(found * GRAIN_TOKENS, (len(ids) - found) * GRAIN_TOKENS) if found else 0.0
        if isinstance(rule, LookAhead):
            rule.now += len(request)
    return {"hit_rate": hits / asked, "saved": saved / total}, tree


def _in_grains(seconds: RecomputeCost) -> Callable[[float, float], float]:
    return lambda cached, new: seconds(cached * GRAIN_TOKENS, new * GRAIN_TOKENS)


def swapped(trace: Trace, seconds: RecomputeCost) -> dict[str, float]:
    """Return bytes copied to the host, by whether copies stay there, in those of all chunks' KV."""
    found = {}
    all_nbytes = trace.total / GRAIN_TOKENS * NODE_NBYTES
    for once in (True, False):
        host = HostLevel(int(0.4 * all_nbytes), torch.clone, torch.clone, once)
        _, tree = replay_tree(trace, "pgdsf", 0.05, seconds, host)
        found["once" if once else "every time"] = tree.swaps.out_nbytes / all_nbytes
    return found


def compare(trace: Trace, seconds: RecomputeCost) -> dict[str, Any]:
    """Return every policy's shares at every budget, in the store and in the tree."""
    names = [*POLICIES, AHEAD]
    found: dict[str, Any] = {
        "chunks": {name: [replay_chunks(trace, name, share, seconds) for share in BUDGETS] for name in names},
        "tree": {name: [replay_tree(trace, name, share, seconds)[0] for share in BUDGETS] for name in names},
    }
    for where in ("chunks", "tree"):
        best = [max((found[where][n][i]["saved"], n) for n in POLICIES if n != "pgdsf") for i in range(len(BUDGETS))]
        mine = [one["saved"] for one in found[where]["pgdsf"]]
        found[f"pgdsf_over_best_in_{where}"] = [
            {"budget": share, "ratio": my / max(other, 1e-9), "best": name}
            for share, my, (other, name) in zip(BUDGETS, mine, best, strict=True)
        ]
    return {"requests": len(trace.requests), "tokens": trace.total, "swapped_out": swapped(trace, seconds), **found}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw saved seconds over budgets: a column a trace, a row each for the store and the tree."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(results), figsize=(3.2 * len(results), 6.4), layout="constrained", sharex=True)
    styles = dict(zip([*POLICIES, AHEAD], ("o-", "s--", "^:", "D-", "v--", "k."), strict=True))
    for row, where in zip(axes, ("chunks", "tree"), strict=True):
        for plot, (name, result) in zip(row, results.items(), strict=True):
            for policy, shares in result[where].items():
                plot.plot([100 * share for share in BUDGETS], [100 * one["saved"] for one in shares], styles[policy],
                          label=policy, markersize=4, linewidth=1.4)  # fmt: skip
            plot.set_title(f"{name}, {where}", fontsize=10)
            plot.grid(alpha=0.3)
        row[0].set_ylabel("saved seconds (%)")
    for plot in axes[-1]:
        plot.set_xlabel("budget (% of all chunks' tokens)")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def measured() -> RecomputeCost:
    """Measure the prefill times of the embedded model as an engine does."""
    with TemporaryDirectory() as folder, FusedKVEngine(kv_dir=folder) as engine:
        engine.corpus.cost.measure(loop_of(engine.loaded.model))
        if engine.corpus.cost.seconds is None:
            raise RuntimeError("the engine has measured nothing")
        return engine.corpus.cost.seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the question files")
    parser.add_argument("--cost", type=Path, default=None, help="measured times: cached_tokens, new_tokens, seconds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "eviction.json")
    args = parser.parse_args()
    seconds = RecomputeCost(**json.loads(args.cost.read_text())) if args.cost else measured()
    traces = {f"zipf {exponent}": zipf_trace(exponent) for exponent in EXPONENTS}
    traces |= {name: file_trace(args.data / f"{name}.jsonl") for name in FILES}
    results = {}
    for name, trace in traces.items():
        results[name] = found = compare(trace, seconds)
        print(f"\n{name}: {found['requests']} requests, {found['tokens']} tokens; swapped {found['swapped_out']}")
        for where in ("chunks", "tree"):
            for policy, shares in found[where].items():
                print(f"  {where:<7}{policy:<12}" + "".join(f"{one['saved']:>8.1%}" for one in shares), flush=True)
    about = {"cached_tokens": seconds.cached_tokens, "new_tokens": seconds.new_tokens, "seconds": seconds.seconds}
    head = {"environment": environment(), "budgets": BUDGETS, "cost": about}
    args.out.write_text(json.dumps({**head, "traces": results}, indent=1) + "\n", encoding="utf-8")
    draw(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
