"""Attention of one decoding step on a CPU: one call a layer for all sequences, against one for each sequence.

    python benchmarks/decode_attention.py
    OMP_NUM_THREADS=1 python benchmarks/decode_attention.py --sequences 1 --dtypes bfloat16

By default 8 sequences of 2,000 tokens and SmolLM2-135M's shape: 30 layers, 9 query heads, 3 key heads, 64 dimensions.
Both write the new token's key and value to each sequence's cache and attend it to what is there. As both are bound by
reading the caches, a plain read of as many bytes (torch's sum of a float32 tensor) takes turns with them. The shortest
of the rounds counts: whatever else the machine does only makes calls longer.

One bound is checked: the caches are read at no less than 60% of the speed of the plain read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from environment import environment

from fused_kv_kernels import DecodeCaches, RowPlan, decode_attention, row_attention

LEAST_SHARE_OF_READ = 0.6


@dataclass(frozen=True, slots=True)
class Shape:
    """What is decoded: sequences of so many tokens each, and the model's shape."""

    sequences: int = 8
    keys: int = 2000
    layers: int = 30
    q_heads: int = 9
    kv_heads: int = 3
    dim: int = 64

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that a step reads."""
        return 2 * self.sequences * self.layers * self.kv_heads * self.keys * self.dim * dtype.itemsize


def contestants(shape: Shape, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return what is timed; the first two return the last layer's output."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    whole = (shape.layers, 1, shape.kv_heads, shape.keys + 64, shape.dim)
    caches = [(drawn(*whole), drawn(*whole)) for _ in range(shape.sequences)]
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (drawn(1, shape.sequences, count, shape.dim).transpose(1, 2) for count in heads)
    last, scale = shape.keys - 1, shape.dim**-0.5
    at = torch.tensor([last])
    as_read = torch.zeros(shape.nbytes(dtype) // 4)

    def together() -> torch.Tensor:
        step = DecodeCaches(caches, [last] * shape.sequences)
        return [decode_attention(q, k, v, step, layer, scale) for layer in range(shape.layers)][-1]

    def one_by_one() -> torch.Tensor:
        plan = RowPlan(at, shape.keys)
        for layer in range(shape.layers):
            out = [attended(row, layer, plan) for row in range(shape.sequences)]
        return torch.cat(out, dim=2)

    def attended(row: int, layer: int, plan: RowPlan) -> torch.Tensor:
        span = slice(row, row + 1)
        parts = [part[layer] for part in caches[row]]
        for part, new in zip(parts, (k, v), strict=True):
            part.index_copy_(2, at, new[:, :, span])
        return row_attention(q[:, :, span], *(part[:, :, : shape.keys] for part in parts), plan, scale)

    return {"together": together, "one_by_one": one_by_one, "plain_read": as_read.sum}


def measure(shape: Shape, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Return the least seconds of every contestant, and how near reading the caches comes to a plain read."""
    runs = contestants(shape, dtype)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - started)
    seconds = {name: min(found) for name, found in times.items()}
    share = seconds["plain_read"] / seconds["together"]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        **asdict(shape),
        "nbytes": shape.nbytes(dtype),
        "seconds": seconds,
        "times_one_by_one": seconds["one_by_one"] / seconds["together"],
        "share_of_read": share,
        "holds": share >= LEAST_SHARE_OF_READ,
    }


def describe(r: dict[str, Any]) -> str:
    """Return one measurement as a line."""
    ms = {name: f"{1000 * found:.1f} ms" for name, found in r["seconds"].items()}
    return (
        f"{r['dtype']}, {r['sequences']} x {r['keys']} keys: together {ms['together']}, one by one {ms['one_by_one']} "
        f"({r['times_one_by_one']:.1f}x), plain read {ms['plain_read']}: {r['share_of_read']:.2f} of its speed, "
        f"at least {LEAST_SHARE_OF_READ}: {'holds' if r['holds'] else 'DOES NOT HOLD'}"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--keys", type=int, default=2000)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "decode_attention.json")
    args = parser.parse_args()
    records = []
    for dtype in args.dtypes:
        for sequences in args.sequences:
            records.append(measure(Shape(sequences, args.keys), getattr(torch, dtype), args.rounds))
            print(describe(records[-1]), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"environment": environment(), "records": records}, indent=1))


if __name__ == "__main__":
    main()
