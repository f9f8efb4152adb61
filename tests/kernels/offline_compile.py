"""Compile every kernel for a device that is not there; run as a script, since the tests' process interprets kernels.

Each operator is called as its users call it, on tensors of the CPU. In place of a launch, Triton compiles the kernel
for the given compute capability, down to machine code, with the arguments' own specialisations. Prints, for every
kernel, what it would use, as JSON; ``--all`` compiles every shape that is offered for tuning, not only the first.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from fused_kv_kernels import ChunkShift, PageTable, RotationTable, SharedPages, ShiftStack, TransferPlan
from fused_kv_kernels.scoring import Scoring
from fused_kv_kernels.triton_ops import configs

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FOUND: list[dict[str, Any]] = []


def _usage(cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        call = [str(BIN / "cuobjdump"), "-res-usage", "-sass", file.name]
        text = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(name + r":(\d+)", text)[0]) for name in ("REG", "STACK"))
    words = {name: len(re.findall(rf"\b{name}\b", text)) for name in ("HGMMA", "HMMA", "LDL", "STL", "LDGSTS")}
    words["LDG_16_bytes"] = len(re.findall(r"\bLDG\.E\.\S*128", text))
    return {"registers": registers, "stack_bytes": stack, **words}


def _compile_only(capability: int) -> None:
    target = GPUTarget("cuda", capability, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _: 0
    )
    triton.runtime.driver.set_active(driver)
    run = JITFunction.run

    def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        shape = {k: v for k, v in kwargs.items() if k.startswith(("BLOCK", "num_"))}
        memory = {"shared_bytes": kernel.metadata.shared}
        FOUND.append({"kernel": self.__name__, **shape, **memory, **_usage(kernel.asm["cubin"])})
        print(json.dumps(FOUND[-1]), flush=True)
        return kernel

    JITFunction.run = compile_kernel
    # Nothing can be timed: all shapes are equally fast.
    Autotuner._bench = lambda self, *args, config, **meta: (
        self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True, "grid": (1,)}) and [1.0, 1.0, 1.0]
    )


def _offer(capability: int, dtype: torch.dtype, every: bool) -> None:
    generation = {9: "hopper", 8: "ampere"}.get(capability // 10, "default")
    configs._generation = lambda: generation
    if not every:
        for table in (configs._MANY, configs._FEW):
            table[generation] = table[generation][:1]
        # Only float32 and wide heads take these; they take no others.
        exact = dtype == torch.float32
        configs._special = lambda: (*(configs._EXACT[-1:] if exact else ()), configs._WIDE, configs._WIDE_EXACT)


def _pages(q: torch.Tensor, rows: torch.Tensor) -> None:
    from fused_kv_kernels.triton_ops import paged_rows

    dim = q.shape[3]
    table = PageTable([[SharedPages(range(10), 600, 5, 5)]], [[11]], 64, torch.ones(dim // 2))
    pages = torch.empty(12, 4, 64, dim, dtype=q.dtype)
    paged_rows.paged_rows(q[:, :, :1], pages, pages, table, rows[:1], 0.125, splits=2)
    paged_rows.paged_rows(q, pages, pages, table, rows, 0.125, splits=1)


def _call(dtype: torch.dtype, dim: int, only: str | None) -> None:
    from fused_kv_kernels.triton_ops import (
        kv_deviation,
        place_chunks,
        rerotate_keys,
        row_attention,
        shift_chunks,
        token_scores,
        transfer_deviation,
    )

    q, k = torch.empty(1, 28, 640, dim, dtype=dtype), torch.empty(1, 4, 4096, dim, dtype=dtype)
    rows = torch.arange(640)
    if only == "pages":
        _pages(q, rows)
        return
    plain = Scoring(0.125)
    row_attention.row_attention(q, k, k, rows, plain, splits=1)
    if only == "rows":
        return
    row_attention.row_attention(q[:, :, :1], k, k, rows[:1], plain, splits=8)
    stands, lengths = torch.arange(4096), torch.tensor([4000])
    extras = {"kv_positions": stands, "q_lengths": lengths, "kv_lengths": lengths}
    row_attention.row_attention(q, k, k, rows, plain, **extras, splits=1)
    scoring, firsts = Scoring(0.125, 50.0, torch.zeros(28)), (rows - 99).clamp(min=0)
    row_attention.row_attention(q, k, k[..., : dim // 2], rows, scoring, first_keys=firsts, splits=2)
    token_scores.token_scores(q, k, rows, plain, splits=4)
    token_scores.token_scores(q, k, rows, scoring, firsts, splits=4)
    half = dim // 2
    _pages(q, rows)
    one, every = (RotationTable(*(torch.empty(rows, half),) * 2) for rows in (1, 4096))
    place_chunks.place_chunks([(k[0], k[0])], [0], one, k[0], k[0])
    rerotate_keys.rerotate_keys(k[0], every)
    bytes_ = (torch.empty(2, 4, 99, dim, dtype=torch.int8), torch.empty(2, 4, 99, 1))
    stack = ShiftStack([ChunkShift(5, slice(1, 99), 0.5, bytes_, bytes_)], [one] * 2)
    shift_chunks.shift_chunks(stack, 1, k[0], k[0])
    plan = TransferPlan(rows, rows, torch.tensor([[0, 4000]]), torch.ones(1))
    transfer_deviation.transfer_deviation(plan, every, q[0, :4], q[0, :4], k[0], k[0])
    kv_deviation.kv_deviation(k[0], k[0], k[0], k[0], rows, rows)


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", choices=("rows", "pages"), help="row attention without extras, or that over pages")
    arguments = parser.parse_args()
    _compile_only(arguments.capability)
    dtype = getattr(torch, arguments.dtype)
    _offer(arguments.capability, dtype, arguments.all)
    _call(dtype, arguments.dim, arguments.only)


if __name__ == "__main__":
    main()
