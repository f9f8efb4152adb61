"""Every operator of fused_kv_kernels against its counterparts in torch.

    python benchmarks/kernels.py                # 4K to 128K on the GPU
    python benchmarks/kernels.py --toy          # small sizes on any machine: a check that it runs, not a measurement

Row attention of scattered rows is measured against SDPA's flash kernel over all rows (which is what FlashAttention
needs to give the same rows, FusionRAG section 5.4), SDPA with a mask, FlexAttention, whose mask creation is timed
apart, and the reference. The heads are Qwen2.5-7B's: 28 query heads, 4 key heads, 128 dimensions.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from environment import environment
from kernel_cases.clock import Ceilings
from kernel_cases.others import measure_others
from kernel_cases.rows import RowCase, measure_rows
from rich.console import Console
from rich.table import Table

mpl.use("Agg")
import matplotlib.pyplot as plt

RATIOS = (0.05, 0.15, 0.3, 1.0)
# The one that has bounds (gpu_bounds.py) comes first: whoever has little time has it.
CONTEXTS = (32768, 4096, 8192, 16384, 65536, 131072)


def measure(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[list[dict[str, Any]]]:
    """Yield each size's records; what fails, or is not begun in time, is a record that says so."""
    until = time.monotonic() + 60 * args.minutes
    for batch in args.batches:
        for keys in args.contexts:
            cases = [partial(measure_rows, RowCase(batch, keys, ratio), device, dtype) for ratio in RATIOS]
            cases.append(partial(measure_others, keys, batch, device, dtype))
            records: list[dict[str, Any]] = []
            for case in cases:
                in_time = time.monotonic() < until
                found = _all_of(case) if in_time else [{"failed": f"not begun within {args.minutes:g} minutes"}]
                records += [{"batch": batch, "keys": keys, **record} for record in found]
            print(f"batch {batch}, {keys} keys: {len(records)} records", flush=True)
            yield records


def _all_of(case: Callable[[], Iterator[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a case's records; if it fails, those before, and one with what it failed with."""
    found: list[dict[str, Any]] = []
    try:
        for record in case():
            found.append(record)  # noqa: PERF402 - what came before a failure is kept
    except Exception as error:
        traceback.print_exc()
        found.append({"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def with_shares(records: list[dict[str, Any]], ceilings: Ceilings) -> list[dict[str, Any]]:
    """Add what share of the device's measured ceilings each record reaches, and how it compares with ours."""
    ours = {_case(r): r["seconds"] for r in records if "seconds" in r and r["what"] == r["operator"]}
    for record in records:
        if "seconds" not in record:
            continue
        record["times_ours"] = record["seconds"] / ours[_case(record)]
        record["share_of_bandwidth"] = record["bytes_per_s"] / ceilings.bytes_per_s
        if "flops_per_s" in record:
            record["share_of_matrix_rate"] = record["flops_per_s"] / ceilings.flops_per_s
    return records


def _case(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("operator", "batch", "keys", "ratio"))


def print_table(records: list[dict[str, Any]], title: str) -> None:
    """Print one line a contestant."""
    table = Table(title=title)
    columns = ("operator", "batch", "keys", "ratio", "what", "ms", "host ms", "x ours", "TFLOP/s", "GB/s", "of peak")
    for column in columns:
        table.add_column(column, justify="left" if column in ("operator", "what") else "right")
    for r in records:
        if "seconds" not in r:
            continue
        share = r.get("share_of_matrix_rate", r["share_of_bandwidth"])
        table.add_row(
            r["operator"], str(r["batch"]), str(r["keys"]), "" if r["ratio"] is None else f"{r['ratio']:g}",
            r["what"], f"{1000 * r['seconds']:.3f}", f"{1000 * r['host_s']:.3f}" if "host_s" in r else "",
            f"{r['times_ours']:.2f}",
            f"{r['flops_per_s'] / 1e12:.1f}" if "flops_per_s" in r else "", f"{r['bytes_per_s'] / 1e9:.0f}",
            f"{share:.0%}",
        )  # fmt: skip
    Console(width=140).print(table)
    for r in records:
        if "failed" in r:
            print(f"batch {r['batch']}, {r['keys']} keys, {r.get('what', 'the rest')}: {r['failed']}")


def draw(records: list[dict[str, Any]], batch: int, path: Path, title: str) -> None:
    """Draw how many times sooner row attention is than SDPA over all rows, against the share of rows."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    wanted = [r for r in records if r.get("what") == "SDPA flash, all rows" and r["batch"] == batch]
    for keys in sorted({r["keys"] for r in wanted}):
        points = sorted((r["ratio"], r["times_ours"]) for r in wanted if r["keys"] == keys)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{keys} keys")
    axes.plot(RATIOS, [1 / r for r in RATIOS], color="black", linestyle=":", label="ideal: 1 / share")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(RATIOS, [f"{r:g}" for r in RATIOS])
    axes.set_xlabel("share of rows that are computed")
    axes.set_ylabel("times sooner than SDPA over all rows")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Run the benchmark; return 1 if a size or one of ours failed, however much else was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--toy", action="store_true", help="512 and 1024 keys, batch 1, on whatever device there is")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no size after so many; the rest fails")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    # A toy's figures are no results.
    folder = Path(tempfile.gettempdir()) if args.toy else Path(__file__).parent / "results"
    args.out = args.out or folder / f"kernels_{'toy' if args.toy else 'gpu'}"
    if args.toy:
        args.contexts, args.batches = [512, 1024], [1]
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device: --toy checks that the benchmark runs")
    device, dtype = torch.device("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, args.dtype)
    ceilings = Ceilings.measure(device, dtype, args.toy)
    stamp = environment()
    records: list[dict[str, Any]] = []
    peaks = {"matrix_flops_per_s": ceilings.flops_per_s, "copy_bytes_per_s": ceilings.bytes_per_s}
    result = {"environment": stamp, "dtype": args.dtype, "ceilings": peaks, "records": records}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for found in measure(args, device, dtype):
        records += with_shares(found, ceilings)
        # After every size: what is cut off keeps what it has.
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1))
    title = f"{'Toy sizes, ' if args.toy else ''}{args.dtype} on {stamp['gpu'] or stamp['cpu']}, 28/4 heads of 128"
    print_table(records, title)
    print(f"ceilings: {ceilings.flops_per_s / 1e12:.1f} TFLOP/s, {ceilings.bytes_per_s / 1e9:.0f} GB/s")
    draw(records, args.batches[0], args.out.with_suffix(".png"), title)
    return int(any("failed" in record and "what" not in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
