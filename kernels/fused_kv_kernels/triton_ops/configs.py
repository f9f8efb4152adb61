"""The block shapes that autotuning tries, by generation of GPU.

Hopper's matrix instructions take 64 rows for each group of four warps, so its blocks are large and deeply pipelined.
Ampere and Ada have less shared memory. Any other device gets shapes that fit into 64 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton

if TYPE_CHECKING:
    from fused_kv_kernels.rotate import RotationTable

__all__ = [
    "FEW_ROWS",
    "WIDE_DIM",
    "block_dim",
    "few_rows",
    "is_interpreted",
    "key_value_blocks",
    "many_rows",
    "multiprocessors",
    "page_blocks",
    "prune",
    "row_block",
    "score_blocks",
]

# Up to so many packed rows, one block holds them all.
FEW_ROWS = 64

# Heads of more dimensions than this get shapes of their own.
WIDE_DIM = 256

# (BLOCK_M, BLOCK_N, warps, stages). Compiled for compute capability 9.0 and 8.0 at 128 dimensions, these spill no or
# hardly any registers; blocks twice as large for their warps spill hundreds.
_MANY = {
    "hopper": ((128, 128, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3), (64, 64, 8, 2), (64, 32, 4, 2)),
    "ampere": ((128, 32, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3), (32, 32, 4, 2)),
    "default": ((16, 32, 4, 1),),
    "interpreter": ((32, 32, 4, 1),),
}
# (BLOCK_N, warps, stages): the rows are as many as there are.
_FEW = {
    "hopper": ((128, 4, 2), (128, 8, 2), (64, 4, 4), (64, 4, 2), (32, 4, 2)),
    "ampere": ((128, 8, 2), (64, 4, 3), (32, 4, 4), (32, 4, 2)),
    "default": ((32, 4, 1), (16, 4, 1)),
    "interpreter": ((32, 4, 1),),
}
# float32 has no matrix instruction that is exact enough: its products unroll into single operations.
_EXACT = ((16, 32, 8, 2), (16, 16, 4, 2))
# 512 dimensions: 80 KiB in bfloat16, 96 KiB in float32.
_WIDE, _WIDE_EXACT = (16, 32, 8, 1), (16, 16, 8, 1)
_SHARED_BYTES = {"hopper": 227 * 1024, "ampere": 99 * 1024, "default": 64 * 1024, "interpreter": math.inf}


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def _generation() -> str:
    if is_interpreted():
        return "interpreter"
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "default"
    major, _ = torch.cuda.get_device_capability()
    return {8: "ampere", 9: "hopper"}.get(major, "ampere" if major > 9 else "default")


def _special() -> tuple[tuple[int, int, int, int], ...]:
    # A single shape needs no timing, which the interpreter could not do.
    return () if is_interpreted() else (*_EXACT, _WIDE, _WIDE_EXACT)


def many_rows() -> list[triton.Config]:
    """Return the shapes for blocks of many rows: ``BLOCK_M`` and ``BLOCK_N``."""
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in (*_MANY[_generation()], *_special())
    ]


def few_rows() -> list[triton.Config]:
    """Return the shapes for one block of at most 64 rows: ``BLOCK_N``."""
    return [
        triton.Config({"BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for n, warps, stages in (*_FEW[_generation()], *(shape[1:] for shape in _special()))
    ]


def row_block(dtype: torch.dtype, dim: int, packed: int) -> int:
    """Return ``BLOCK_M`` for so many packed rows; for many, whose shapes differ in it, about what they have."""
    if packed > FEW_ROWS:
        return 128
    # In float32 there is no matrix instruction that is exact enough, so larger blocks only spill registers.
    return 16 if dtype == torch.float32 or dim > WIDE_DIM else max(16, triton.next_power_of_2(packed))


def prune(configs: Sequence[triton.Config], args: Mapping[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Drop shapes of another dtype or whose blocks cannot fit into shared memory; keep at least the smallest.

    Compiling a shape only to find that it does not fit costs seconds.
    """
    meta = {**args, **kwargs}
    itemsize = meta["k"].element_size()

    def shared_bytes(config: triton.Config) -> int:
        rows = config.kwargs.get("BLOCK_M", meta.get("BLOCK_M", 64))
        keys = config.num_stages * config.kwargs["BLOCK_N"]
        return int(((rows + keys) * meta["BLOCK_D"] + keys * meta["BLOCK_DV"]) * itemsize)

    def special(config: triton.Config) -> bool:
        shape = config.kwargs["BLOCK_N"], config.num_warps, config.num_stages
        return shape in {special[1:] for special in wanted or (*_EXACT, _WIDE, _WIDE_EXACT)}

    is_wide, is_exact = max(meta["BLOCK_D"], meta["BLOCK_DV"]) > WIDE_DIM, itemsize == 4
    wanted = ((_WIDE_EXACT if is_exact else _WIDE),) if is_wide else _EXACT if is_exact else ()
    limit = _SHARED_BYTES[_generation()]
    fitting = [c for c in configs if shared_bytes(c) <= limit and special(c) == bool(wanted)]
    return fitting or [min(configs, key=shared_bytes)]


def score_blocks(dtype: torch.dtype, dim: int) -> dict[str, int]:
    """Return the one shape that kernels without values use: ``BLOCK_M``, ``BLOCK_N``, warps and stages."""
    if is_interpreted():
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    if _generation() == "default":
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    if dim > WIDE_DIM:
        return {"BLOCK_M": 16, "BLOCK_N": 16 if dtype == torch.float32 else 32, "num_warps": 8, "num_stages": 1}
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}


def page_blocks(dtype: torch.dtype, dim: int, packed: int) -> dict[str, int]:
    """Return the one shape that attention over pages uses for so many packed rows: ``BLOCK_M``, warps and stages."""
    block = max(16, min(FEW_ROWS, triton.next_power_of_2(packed)))
    if is_interpreted():
        return {"BLOCK_M": block, "num_warps": 4, "num_stages": 1}
    # A second stage of float32 pages of 256 dimensions is more than an A100 has.
    if dtype == torch.float32 or _generation() == "default":
        return {"BLOCK_M": 16, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_M": block, "num_warps": 8 if dim > 128 else 4, "num_stages": 2}


def block_dim(dim: int) -> int:
    """Return the head dimension padded to a power of two that a matrix instruction takes."""
    padded: int = triton.next_power_of_2(dim)
    return max(16, padded)


def key_value_blocks(layer_keys: torch.Tensor, layer_values: torch.Tensor, table: RotationTable) -> dict[str, int]:
    """Return what kernels that rotate keys and take values beside them know of a layer ``[H, N, D]`` beforehand.

    Heads and widths of either, padded to blocks; the pairs of dimensions that are rotated; what is not.
    """
    (key_heads, _, dim), (value_heads, _, value_dim) = layer_keys.shape, layer_values.shape
    rest = dim - 2 * table.half
    return {
        "KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "INTERLEAVED": table.interleaved,
        "D": dim, "DV": value_dim, "BLOCK_DV": block_dim(value_dim),
        "HALF": table.half, "BLOCK_HALF": triton.next_power_of_2(max(table.half, 1)),
        "REST": rest, "BLOCK_REST": triton.next_power_of_2(max(rest, 1)),
    }  # fmt: skip


def multiprocessors(device: torch.device) -> int:
    """Return how many programs the device runs side by side; 4 in the interpreter, so that small tests split too."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
