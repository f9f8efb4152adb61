"""Row attention and whom it is measured against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fused_kv_kernels import RowPlan, row_attention
from fused_kv_kernels.reference import row_attention_reference

from .clock import median_s, once_s, relative_error

__all__ = ["RowCase", "measure_rows"]

_MOST_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True)
class RowCase:
    """Sizes of one measurement: scattered rows of a context, drawn at random, the last one always among them."""

    batch: int
    keys: int
    ratio: float
    q_heads: int = 28
    kv_heads: int = 4
    dim: int = 128

    def positions(self, device: torch.device) -> Tensor:
        """Return int64 ``[R]``, ascending."""
        rows = max(1, round(self.ratio * self.keys))
        drawn = torch.randperm(self.keys - 1, generator=torch.Generator().manual_seed(self.keys))[: rows - 1]
        return torch.cat((drawn.sort().values, torch.tensor([self.keys - 1]))).to(device)

    def flops(self, positions: Tensor) -> float:
        """Return the operations that scores and weighted sums of the seen keys take."""
        return 4.0 * self.dim * self.q_heads * self.batch * float((positions + 1).sum())

    def nbytes(self, rows: int, itemsize: int) -> float:
        """Return the fewest bytes that must be moved."""
        return float(self.batch * self.dim * itemsize * (2 * self.q_heads * rows + 2 * self.kv_heads * self.keys))


def measure_rows(case: RowCase, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield one record a contestant: seconds, and its error against SDPA in float32 where that is affordable."""
    positions = case.positions(device)
    rows, scale = positions.shape[0], case.dim**-0.5
    q_all = torch.randn(case.batch, case.q_heads, case.keys, case.dim, device=device).to(dtype)
    k, v = (torch.randn(case.batch, case.kv_heads, case.keys, case.dim, device=device).to(dtype) for _ in range(2))
    q = q_all[:, :, positions].contiguous()
    plan = RowPlan(positions, case.keys)
    flops, nbytes = case.flops(positions), case.nbytes(rows, q.element_size())

    def record(name: str, seconds: float, **more: Any) -> dict[str, Any]:
        rates = {"flops_per_s": flops / seconds, "bytes_per_s": nbytes / seconds}
        sizes = {"batch": case.batch, "keys": case.keys, "ratio": case.ratio, "rows": rows}
        return {"operator": "row attention", "what": name, **sizes, "seconds": seconds, **rates, **more}

    def all_rows() -> Tensor:
        if device.type != "cuda":
            return sdpa(q_all, k, v, is_causal=True, scale=scale, enable_gqa=True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(q_all, k, v, is_causal=True, scale=scale, enable_gqa=True)

    ours = row_attention(q, k, v, plan, scale)
    error = relative_error(ours, all_rows()[:, :, positions])
    yield record("row attention", median_s(lambda: row_attention(q, k, v, plan, scale)), error=error)
    yield record("SDPA flash, all rows", median_s(all_rows))
    if rows * case.keys <= _MOST_BYTES:
        mask = torch.arange(case.keys, device=device)[None, :] <= positions[:, None]
        seconds = median_s(lambda: sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True))
        yield record("SDPA, mask", seconds)
        del mask
        yield from _flex(record, q, k, v, positions, scale)
    scores_nbytes = 8 * case.batch * case.q_heads * rows * case.keys
    if scores_nbytes <= _MOST_BYTES:
        run = lambda: row_attention_reference(q, k, v, positions, scale)  # noqa: E731
        yield record("reference", median_s(run), error=relative_error(ours, run()))


def _flex(record: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Iterator[dict[str, Any]]:
    """FlexAttention; what it needs before it can run is timed apart."""
    on_cuda = q.device.type == "cuda"

    def sees(_b: Tensor, _h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return column <= positions[row]

    def make_mask() -> Any:
        return create_block_mask(sees, None, None, q.shape[2], k.shape[2], device=str(q.device))

    attend = torch.compile(flex_attention, dynamic=False) if on_cuda else flex_attention
    try:
        make_mask()
        mask_s = once_s(make_mask)
        mask = make_mask()
        seconds = median_s(lambda: attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=True))
    except (RuntimeError, torch.OutOfMemoryError) as error:
        yield {**record("FlexAttention", float("inf")), "failed": str(error).splitlines()[0]}
        return
    yield record("FlexAttention", seconds, mask_s=mask_s)
