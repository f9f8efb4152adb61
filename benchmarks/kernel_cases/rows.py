"""Row attention and whom it is measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fused_kv_kernels import RowPlan, row_attention
from fused_kv_kernels.reference import row_attention_reference

from .clock import host_s, median_s, once_s, relative_error

__all__ = ["RowCase", "measure_rows"]

_MOST_BYTES = 8 * 2**30
_ORACLE_ROWS = 64


@dataclass(frozen=True, slots=True)
class RowCase:
    """Sizes of one measurement: scattered rows of a context, drawn at random, the last one always among them."""

    batch: int
    keys: int
    ratio: float
    q_heads: int = 28
    kv_heads: int = 4
    dim: int = 128

    @property
    def sizes(self) -> dict[str, Any]:
        """What every record says of its case."""
        return {"operator": "row attention", "batch": self.batch, "keys": self.keys, "ratio": self.ratio}

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


@dataclass(frozen=True, slots=True)
class _Operands:
    """Rows ``q`` ``[B, Hq, R, D]`` at ``positions`` ``[R]``, keys and values ``[B, Hkv, N, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    scale: float


def measure_rows(case: RowCase, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield one record a contestant: its seconds, or why it did not run."""
    positions = case.positions(device)
    q_all = torch.randn(case.batch, case.q_heads, case.keys, case.dim, device=device).to(dtype)
    k, v = (torch.randn(case.batch, case.kv_heads, case.keys, case.dim, device=device).to(dtype) for _ in range(2))
    on = _Operands(q_all[:, :, positions].contiguous(), k, v, positions, case.dim**-0.5)
    rows, flops = positions.shape[0], case.flops(positions)
    nbytes = case.nbytes(rows, on.q.element_size())

    def record(name: str, run: Callable[[], object], **more: Any) -> dict[str, Any]:
        seconds = median_s(run)
        rates = {"flops_per_s": flops / seconds, "bytes_per_s": nbytes / seconds}
        return {**case.sizes, "rows": rows, "what": name, "seconds": seconds, **rates, **more}

    ours = partial(row_attention, on.q, k, v, RowPlan(positions, case.keys), on.scale)
    yield record("row attention", ours, error=_error(ours(), on), host_s=host_s(ours))
    yield record("SDPA flash, all rows", partial(_flash, q_all, k, v, on.scale))
    if rows * case.keys <= _MOST_BYTES:
        masked = (partial(_masked, on, expand) for expand in (False, True))
        yield _fastest(record, case, "SDPA, mask", *masked)
        yield _fastest(record, case, "FlexAttention", partial(_flex, on))
    if 8 * case.batch * case.q_heads * rows * case.keys <= _MOST_BYTES:
        yield record("reference", partial(row_attention_reference, on.q, k, v, positions, on.scale))


Prepared = tuple[Callable[[], object], dict[str, Any]]


def _fastest(
    record: Callable[..., dict[str, Any]], case: RowCase, name: str, *ways: Callable[[], Prepared]
) -> dict[str, Any]:
    """Return the record of the fastest way that runs, or what the first one failed with."""
    found, failures = [], []
    for prepare in ways:
        try:
            run, more = prepare()
            found.append(record(name, run, **more))
        except Exception as error:
            # Whatever somebody else's operator raises at some size, ours are still to be measured.
            failures.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return min(found, key=lambda r: r["seconds"]) if found else {**case.sizes, "what": name, "failed": failures[0]}


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    if q.device.type != "cuda":
        return sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def _masked(on: _Operands, expand: bool) -> Prepared:
    """SDPA with a mask: its memory-efficient kernel takes no grouped heads; what takes them writes all scores."""
    groups = on.q.shape[1] // on.k.shape[1] if expand else 1
    keys, values = (part.repeat_interleave(groups, dim=1) if expand else part for part in (on.k, on.v))
    mask = torch.arange(on.k.shape[2], device=on.q.device)[None, :] <= on.positions[:, None]
    return partial(sdpa, on.q, keys, values, attn_mask=mask, scale=on.scale, enable_gqa=not expand), {}


def _flex(on: _Operands) -> Prepared:
    """FlexAttention; what it needs before it can run is timed apart."""
    positions = on.positions

    def sees(_b: Tensor, _h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return column <= positions[row]

    def make_mask() -> Any:
        return create_block_mask(sees, None, None, on.q.shape[2], on.k.shape[2], device=str(on.q.device))

    # After some shapes the compiler gives up on a function, and it would run uncompiled.
    torch.compiler.reset()
    attend = torch.compile(flex_attention, dynamic=False) if on.q.device.type == "cuda" else flex_attention
    make_mask()
    mask_s = once_s(make_mask)
    mask = make_mask()
    return partial(attend, on.q, on.k, on.v, block_mask=mask, scale=on.scale, enable_gqa=True), {"mask_s": mask_s}


def _error(out: Tensor, on: _Operands) -> float:
    """Return the relative error of some rows, from the first to the last, against the reference in float32."""
    some = torch.linspace(0, out.shape[2] - 1, min(_ORACLE_ROWS, out.shape[2]), device=out.device).long()
    sequences = [
        row_attention_reference(q[None].float(), k[None], v[None], on.positions[some], on.scale)
        for q, k, v in zip(on.q[:, :, some], on.k, on.v, strict=True)
    ]
    return relative_error(out[:, :, some], torch.cat(sequences))
