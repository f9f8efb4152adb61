"""Whether the figures of benchmarks/kernels.py and benchmarks/ttft_gpu.py keep to what the GPU path is to reach.

    python benchmarks/gpu_bounds.py FOLDER      # with kernels_gpu.json and ttft_gpu.json in it

Exits with 1 where a bound does not hold or its size was not measured; with --toy it only says what it would look at.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

KEYS = 32768
Records = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Bound:
    """One figure that is to be at least, or at most, so large."""

    what: str
    bound: float
    find: Callable[[Records, Records], float | None]
    at_least: bool = True

    def holds(self, found: float | None) -> bool:
        """Whether a figure, if there is one, keeps to the bound."""
        return found is not None and (found >= self.bound if self.at_least else found <= self.bound)


def _kernel(what: str, field: str, ratio: float | None) -> Callable[[Records, Records], float | None]:
    def find(kernels: Records, _: Records) -> float | None:
        wanted = {"what": what, "keys": KEYS, "batch": 1, "ratio": ratio}
        return next((r[field] for r in kernels if wanted.items() <= r.items()), None)

    return find


def _ttft(what: str) -> Callable[[Records, Records], float | None]:
    def find(_: Records, ttft: Records) -> float | None:
        return next((r["times_sooner"] for r in ttft if r["what"] == what and r["prompt_tokens"] >= KEYS), None)

    return find


def _largest_error(kernels: Records, _: Records) -> float | None:
    return max((r["error"] for r in kernels if "error" in r), default=None)


BOUNDS = (
    Bound("row attention, 15% of 32K rows: times sooner than SDPA flash over all", 5.3,
          _kernel("SDPA flash, all rows", "times_ours", 0.15)),
    Bound("row attention, 15% of 32K rows: times sooner than SDPA with a mask", 4.0,
          _kernel("SDPA, mask", "times_ours", 0.15)),
    Bound("row attention, all of 32K rows: SDPA flash takes at least 1/1.2 of its time", 1 / 1.2,
          _kernel("SDPA flash, all rows", "times_ours", 1.0)),
    Bound("row attention: largest relative error", 2e-2, _largest_error, at_least=False),
    Bound("chunk placement at 32K: share of what a copy reaches", 0.7,
          _kernel("chunk placement", "share_of_bandwidth", None)),
    Bound("chunk placement from int8 at 32K: share of what a copy reaches", 0.7,
          _kernel("chunk placement from int8", "share_of_bandwidth", None)),
    Bound("TTFT at 32K, ratio 0.15 from pinned memory: times sooner than transformers", 4.0,
          _ttft("fused 0.15, pinned memory")),
    Bound("TTFT at 32K, ratio 0 from pinned memory: times sooner than transformers", 12.0,
          _ttft("fused 0, pinned memory")),
)  # fmt: skip


def check(kernels: Records, ttft: Records) -> list[dict[str, Any]]:
    """Return every bound with the figure that was found, None where its size was not measured."""
    found = ((bound, bound.find(kernels, ttft)) for bound in BOUNDS)
    return [
        {"what": b.what, "bound": b.bound, "at_least": b.at_least, "found": x, "holds": b.holds(x)} for b, x in found
    ]


def _read(path: Path, name: str) -> Records:
    records: Records = json.loads(path.read_text())[name] if path.exists() else []
    return records


def main() -> int:
    """Check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--toy", action="store_true", help="small sizes were measured: nothing can hold")
    args = parser.parse_args()
    checked = check(_read(args.folder / "kernels_gpu.json", "records"), _read(args.folder / "ttft_gpu.json", "rows"))
    table = Table(title="What the GPU path is to reach")
    for column in ("what", "bound", "found", ""):
        table.add_column(column, justify="right" if column in ("bound", "found") else "left")
    for row in checked:
        verdict = "not measured" if row["found"] is None else "holds" if row["holds"] else "DOES NOT HOLD"
        found = "" if row["found"] is None else f"{row['found']:.3g}"
        table.add_row(row["what"], f"{'>=' if row['at_least'] else '<='} {row['bound']:.3g}", found, verdict)
    Console(width=120).print(table)
    if not args.toy:
        (args.folder / "bounds_gpu.json").write_text(json.dumps(checked, indent=1))
    return 0 if args.toy or all(row["holds"] for row in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
