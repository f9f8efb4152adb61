"""Row attention on a CPU against scaled_dot_product_attention, in one run.

    python benchmarks/kernels_cpu.py
    python benchmarks/kernels_cpu.py --heads 32 8 128 --dtypes float32 --keep    # beside what the file has of others

Query heads, key heads and dimensions are SmolLM2-135M's (9 3 64), the same without groups (9 9 64) and Llama-3-8B's
(32 8 128), unless --heads names others.

Scattered rows of a context are computed by row attention (with native operators, where the processor has them, and in
plain torch), by SDPA with a mask, and by SDPA's causal kernel over all rows, which is what gives the same rows without
either. All take turns, and the shortest of their rounds counts: whatever else the machine does only makes calls longer.

Two bounds are checked: 15% of the rows of a 4K context cost at most 1.3 times their share of the causal kernel, and row
attention is at no share of rows slower than SDPA with a mask.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from environment import environment
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fused_kv_kernels import RowPlan, row_attention, why_not_native

HEADS = ((9, 3, 64), (9, 9, 64), (32, 8, 128))
RATIOS = (0.05, 0.15, 0.3, 0.5, 0.75, 1.0)
SHARE_BOUND, SHARE_RATIO, SHARE_KEYS = 1.3, 0.15, 4096


def contestants(
    keys: int, ratio: float, heads: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """Return what is timed."""
    q_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(keys)
    drawn = torch.randperm(keys - 1, generator=generator)[: max(round(ratio * keys), 1) - 1]
    rows = torch.cat((drawn.sort().values, torch.tensor([keys - 1])))
    all_q = torch.randn(1, q_heads, keys, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, 1, kv_heads, keys, dim, generator=generator).to(dtype)
    q = all_q[:, :, rows].contiguous()
    mask, plan = torch.arange(keys)[None, :] <= rows[:, None], RowPlan(rows, keys)

    def ours(kernels: str) -> Any:
        os.environ["FUSED_KV_KERNELS"] = kernels
        return row_attention(q, k, v, plan, dim**-0.5)

    found = {
        "causal": lambda: sdpa(all_q, k, v, is_causal=True, enable_gqa=True),
        "mask": lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=True),
        "torch": lambda: ours("torch"),
    }
    if why_not_native(dtype) is None:
        found["native"] = lambda: ours("auto")
    return found


def measure(keys: int, ratio: float, heads: tuple[int, int, int], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Return the least seconds of every contestant and how row attention compares."""
    times: dict[str, list[float]] = {}
    runs = contestants(keys, ratio, heads, dtype)
    for turn in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if turn:
                times.setdefault(name, []).append(time.perf_counter() - started)
    os.environ.pop("FUSED_KV_KERNELS")
    seconds = {name: min(found) for name, found in times.items()}
    ours = {name: seconds[name] for name in ("native", "torch") if name in seconds}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "heads": list(heads),
        "keys": keys,
        "ratio": ratio,
        "seconds": seconds,
        "times_share_of_causal": {name: found / (ratio * seconds["causal"]) for name, found in ours.items()},
        "times_mask": {name: found / seconds["mask"] for name, found in ours.items()},
    }


def bounds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each bound by dtype, heads and implementation, with what was found."""
    found = []
    kinds = dict.fromkeys((r["dtype"], tuple(r["heads"]), name) for r in records for name in r["times_mask"])
    for dtype, heads, name in kinds:
        mine = [r for r in records if (r["dtype"], tuple(r["heads"])) == (dtype, heads)]
        worst = max(mine, key=lambda r: r["times_mask"][name])
        at = f"{worst['keys']} keys, {worst['ratio']:g} of the rows"
        shares = [
            r["times_share_of_causal"][name] for r in mine if (r["keys"], r["ratio"]) == (SHARE_KEYS, SHARE_RATIO)
        ]
        if shares:
            found.append(
                (dtype, heads, name, f"times its share of causal SDPA ({SHARE_RATIO:g} of 4K)", SHARE_BOUND, shares[0])
            )
        found.append((dtype, heads, name, f"times masked SDPA, worst: {at}", 1.0, worst["times_mask"][name]))
    columns = ("dtype", "heads", "implementation", "what", "at_most", "found")
    return [dict(zip(columns, row, strict=True)) | {"holds": row[5] <= row[4]} for row in found]


def print_tables(records: list[dict[str, Any]], checked: list[dict[str, Any]], title: str) -> None:
    """Print all measurements, then the bounds."""
    table = Table(title=title)
    measured = ("causal ms", "mask ms", "native ms", "torch ms", "x share", "x mask")
    for column in ("dtype", "heads", "keys", "ratio", *measured):
        table.add_column(column, justify="right")
    for r in records:
        s = r["seconds"]
        best = "native" if "native" in s else "torch"
        values = (s["causal"], s["mask"], s.get("native"), s["torch"])
        cells = ("" if value is None else f"{1000 * value:.2f}" for value in values)
        compared = (r["times_share_of_causal"][best], r["times_mask"][best])
        case = (r["dtype"], heads_name(r["heads"]), str(r["keys"]), f"{r['ratio']:g}")
        table.add_row(*case, *cells, *(f"{x:.2f}" for x in compared))
    console = Console(width=120)
    console.print(table)
    for b in checked:
        verdict = "holds" if b["holds"] else "DOES NOT HOLD"
        case = f"{b['dtype']}, {heads_name(b['heads'])}, {b['implementation']}"
        console.print(f"{case}: {b['found']:.2f} {b['what']}; at most {b['at_most']}: {verdict}")


def heads_name(heads: Sequence[int]) -> str:
    """Return for example ``9/3 x 64``: query heads, key heads, dimensions."""
    return "{}/{} x {}".format(*heads)


def earlier(path: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a result file has that is not measured anew: its records, and the commands that they come from."""
    if not path.exists():
        return {"commands": [], "records": []}
    found: dict[str, Any] = json.loads(path.read_text())
    anew = {(r["dtype"], tuple(r["heads"])) for r in records}
    found["records"] = [r for r in found["records"] if (r["dtype"], tuple(r["heads"])) not in anew]
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--heads", type=int, nargs=3, action="append", metavar=("QUERY", "KEY", "DIM"))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="keep the results of other dtypes and heads in the file")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels_cpu.json")
    args = parser.parse_args()
    records = [
        measure(keys, ratio, tuple(heads), getattr(torch, dtype), args.rounds)
        for dtype in args.dtypes
        for heads in args.heads or HEADS
        for keys in args.contexts
        for ratio in RATIOS
    ]
    stamp = environment()
    print_tables(records, bounds(records), f"{stamp['cpu']}, {stamp['torch_threads']} threads")
    kept = earlier(args.out, records) if args.keep else {"commands": [], "records": []}
    records = kept["records"] + records
    commands = [*kept["commands"], stamp.pop("command")]
    result = {"environment": stamp, "commands": commands, "bounds": bounds(records), "records": records}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
