"""Replacement policies on retrieval traces: how much of what is asked for is still there.

    python benchmarks/eviction.py --data ../shared/data/squad10.jsonl

Three traces: a skewed one (Zipf, exponent 0.8, chunks of 32 to 1,024 tokens), the passages of a question set in the
order of its questions, and the same with the questions shuffled. Every policy replays them at budgets of 5% to 80% of
all chunks' tokens; a chunk that is missing is computed and stored. Hit rates count tokens, chunks, and the seconds of
recomputation that hits saved. Recomputation is priced by RAGCache's table, seconds by new tokens after cached ones,
measured with SmolLM2-135M in float32 and interpolated.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from environment import environment
from evaluation.questions import read_corpus

from fused_kv_llm.store.index.policies import POLICIES, Entry, EvictionQueue, RecomputeCost

BUDGETS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
MEASURES = ("tokens", "chunks", "cost")
TITLES = {"tokens": "by tokens", "chunks": "by chunks", "cost": "by recompute cost"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a trace: its name, tokens, and the seconds that computing it takes."""

    key: str
    tokens: int
    cost: float


def zipf_trace(cost: RecomputeCost, chunks: int = 2000, requests: int = 8000, k: int = 5) -> list[Chunk]:
    """Return the chunks asked for by requests of `k` chunks; popularity and length are independent."""
    rng = random.Random(1)
    lengths = [int(32 * 2 ** rng.uniform(0, 5)) for _ in range(chunks)]
    known = [Chunk(str(i), tokens, cost(0, tokens)) for i, tokens in enumerate(lengths)]
    weights = [1 / (rank + 1) ** 0.8 for rank in range(chunks)]
    return [chunk for _ in range(requests) for chunk in rng.choices(known, weights=weights, k=k)]


def passage_trace(path: Path, cost: RecomputeCost, *, shuffled: bool) -> list[Chunk]:
    """Return the passages of a set's questions; a token is 4.2 characters, as SmolLM2 cuts English."""
    texts = read_corpus(path)
    lengths = {text: max(1, round(len(text) / 4.2)) for text in texts}
    known = {text: Chunk(str(i), lengths[text], cost(0, lengths[text])) for i, text in enumerate(texts)}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if shuffled:
        random.Random(2).shuffle(records)
    return [known[passage["text"]] for record in records for passage in record["passages"]]


def replay(trace: Sequence[Chunk], policy: str, budget_tokens: float) -> dict[str, float]:
    """Return the hit rates of a policy by `MEASURES`."""
    queue = EvictionQueue(POLICIES[policy])
    sizes: dict[str, int] = {}
    used = 0
    hits, asked = dict.fromkeys(MEASURES, 0.0), dict.fromkeys(MEASURES, 0.0)
    for now, chunk in enumerate(trace):
        worth = {"tokens": chunk.tokens, "chunks": 1, "cost": chunk.cost}
        for name, value in worth.items():
            asked[name] += value
        if chunk.key in queue:
            queue.touch(chunk.key, now)
            for name, value in worth.items():
                hits[name] += value
            continue
        while used + chunk.tokens > budget_tokens:
            victim = queue.pop()
            if victim is None:
                break
            used -= sizes.pop(victim)
        if used + chunk.tokens <= budget_tokens:
            queue.put(chunk.key, Entry(chunk.tokens, chunk.cost, used=now))
            sizes[chunk.key] = chunk.tokens
            used += chunk.tokens
    return {name: hits[name] / asked[name] for name in MEASURES}


def compare(trace: Sequence[Chunk]) -> dict[str, Any]:
    """Return every policy's hit rates at every budget."""
    total = sum(chunk.tokens for chunk in set(trace))
    rates = {name: [replay(trace, name, share * total) for share in BUDGETS] for name in POLICIES}
    behind = [
        {"budget": share, "pgdsf": mine["cost"], "lru": theirs["cost"]}
        for share, mine, theirs in zip(BUDGETS, rates["pgdsf"], rates["lru"], strict=True)
        if mine["cost"] < theirs["cost"]
    ]
    return {"requests": len(trace), "chunks": len(set(trace)), "tokens": total, "hit_rates": rates,
            "pgdsf_behind_lru_by_cost": behind}  # fmt: skip


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw hit rates over budgets: a row a trace, a column a measure."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(results), len(MEASURES), figsize=(12, 3.6 * len(results)), layout="constrained",
                                squeeze=False, sharex=True)  # fmt: skip
    styles = dict(zip(POLICIES, ("o-", "s--", "^:", "D-", "v--"), strict=True))
    for row, (name, result) in zip(axes, results.items(), strict=True):
        for plot, measure in zip(row, MEASURES, strict=True):
            for policy, rates in result["hit_rates"].items():
                plot.plot([100 * share for share in BUDGETS], [100 * r[measure] for r in rates], styles[policy],
                          label=policy, markersize=4, linewidth=1.4)  # fmt: skip
            plot.set_title(f"{name}, {TITLES[measure]}", fontsize=10)
            plot.set_ylabel("hit rate (%)")
            plot.grid(alpha=0.3)
    for plot in axes[-1]:
        plot.set_xlabel("budget (% of all chunks' tokens)")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="question file")
    parser.add_argument("--cost", type=Path, default=None, help="cost table: cached_tokens, new_tokens, seconds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "eviction.json")
    args = parser.parse_args()
    cost = RecomputeCost(**json.loads(args.cost.read_text())) if args.cost else measured_cost()
    name = args.data.stem
    results = {
        "zipf 0.8": compare(zipf_trace(cost)),
        name: compare(passage_trace(args.data, cost, shuffled=False)),
        f"{name} shuffled": compare(passage_trace(args.data, cost, shuffled=True)),
    }
    about = {"cached_tokens": cost.cached_tokens, "new_tokens": cost.new_tokens, "seconds": cost.seconds}
    head = {"environment": environment(), "budgets": BUDGETS, "cost": about}
    args.out.write_text(json.dumps({**head, "traces": results}, indent=1) + "\n", encoding="utf-8")
    draw(results, args.out.with_suffix(".png"))
    for trace, result in results.items():
        print(f"\n{trace}: {result['requests']} requests for {result['chunks']} chunks, {result['tokens']} tokens")
        for measure in MEASURES:
            print(f"  hit rate {TITLES[measure]:<18}" + "".join(f"{share:>8.0%}" for share in BUDGETS))
            for policy, rates in result["hit_rates"].items():
                print(f"    {policy:<24}" + "".join(f"{rate[measure]:>8.1%}" for rate in rates))
        print(
            f"  budgets at which pgdsf is behind lru by recompute cost: {result['pgdsf_behind_lru_by_cost'] or 'none'}"
        )


def measured_cost() -> RecomputeCost:
    """Measure the prefill times of the embedded model: new tokens after cached ones."""
    import time

    import torch
    from transformers import DynamicCache

    from fused_kv_llm.model import load_model

    cached, new = (0, 256), (32, 128, 512, 1024)
    model = load_model("smollm2-135m", dtype="float32").model
    table = []
    with torch.inference_mode():
        model(torch.ones((1, 64), dtype=torch.long))
        for before in cached:
            row = []
            for tokens in new:
                seconds = []
                for _ in range(2):
                    cache = DynamicCache()
                    if before:
                        model(torch.ones((1, before), dtype=torch.long), past_key_values=cache)
                    started = time.perf_counter()
                    model(torch.ones((1, tokens), dtype=torch.long), past_key_values=cache, logits_to_keep=1)
                    seconds.append(time.perf_counter() - started)
                row.append(min(seconds))
            table.append(row)
    return RecomputeCost(cached, new, table)


if __name__ == "__main__":
    main()
