"""The memory-bound operators, each against torch: decoding, pages, chunk placement, token scores, KV deviation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fused_kv_kernels import (
    PageTable,
    RowPlan,
    SharedPages,
    kv_deviation,
    paged_row_attention,
    place_chunks,
    rotation_tables,
    row_attention,
    token_scores,
)

from .clock import median_s

__all__ = ["measure_others"]

Q_HEADS, KV_HEADS, DIM = 28, 4, 128
CHUNK_TOKENS, QUESTION_ROWS, PAGE = 512, 32, 64


@contextmanager
def _in_torch() -> Iterator[None]:
    before = os.environ.get("FUSED_KV_KERNELS")
    os.environ["FUSED_KV_KERNELS"] = "torch"
    try:
        yield
    finally:
        os.environ.pop("FUSED_KV_KERNELS")
        if before is not None:
            os.environ["FUSED_KV_KERNELS"] = before


def measure_others(keys: int, batch: int, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield one record a contestant at one context length."""
    item = torch.empty(0, dtype=dtype).element_size()
    scale = DIM**-0.5

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def pair(operator: str, nbytes: float, run: Callable[[], object], other: str = "plain torch",
             against: Callable[[], object] | None = None) -> Iterator[dict[str, Any]]:  # fmt: skip
        sizes = {"operator": operator, "keys": keys, "batch": batch, "ratio": None}
        seconds = median_s(run)
        yield {**sizes, "what": operator, "seconds": seconds, "bytes_per_s": nbytes / seconds}
        with _in_torch():
            seconds = median_s(against or run)
        yield {**sizes, "what": other, "seconds": seconds, "bytes_per_s": nbytes / seconds}

    q, k, v = random(batch, Q_HEADS, 1, DIM), random(batch, KV_HEADS, keys, DIM), random(batch, KV_HEADS, keys, DIM)
    last = torch.tensor([keys - 1], device=device)
    plan = RowPlan(last, keys)
    yield from pair(
        "decoding", 2.0 * k.nbytes, lambda: row_attention(q, k, v, plan, scale),
        "SDPA", lambda: sdpa(q, k, v, scale=scale, enable_gqa=True),
    )  # fmt: skip

    inv_freq = 1.0 / 10000 ** (torch.arange(0, DIM, 2) / DIM)
    pages = keys // PAGE
    pool = random(2, pages + batch, KV_HEADS, PAGE, DIM)
    chunks = [
        SharedPages(range(at // PAGE, (at + CHUNK_TOKENS) // PAGE), CHUNK_TOKENS, at, at)
        for at in range(0, keys - CHUNK_TOKENS + 1, CHUNK_TOKENS)
    ]
    table = PageTable([chunks] * batch, [[pages + b] for b in range(batch)], PAGE, inv_freq, device)
    beyond = torch.tensor([keys], device=device)
    for request in range(batch):
        table.take(request, [keys])
    # Without pages, every request holds its own copy: SDPA reads that.
    yield from pair(
        "decoding over shared pages", 2.0 * k.nbytes,
        lambda: paged_row_attention(q, *pool, table, beyond, scale),
        "SDPA over copies", lambda: sdpa(q, k, v, scale=scale, enable_gqa=True),
    )  # fmt: skip

    starts = list(range(0, keys - CHUNK_TOKENS + 1, CHUNK_TOKENS))
    tables = tuple(t.to(device) for t in rotation_tables(torch.tensor(starts), inv_freq))
    tokens = len(starts) * CHUNK_TOKENS
    stored = [(random(KV_HEADS, CHUNK_TOKENS, DIM), random(KV_HEADS, CHUNK_TOKENS, DIM)) for _ in starts]
    moved = 2.0 * KV_HEADS * tokens * DIM
    yield from pair("chunk placement", moved * 2 * item, lambda: place_chunks(stored, starts, *tables, k[0], v[0]))
    small = [tuple((30 * part).to(torch.int8) for part in both) for both in stored]
    scale_shapes = ((KV_HEADS, 1, DIM), (KV_HEADS, CHUNK_TOKENS, 1))
    factors = [tuple(torch.rand(shape, device=device).half() for shape in scale_shapes) for _ in starts]
    yield from pair(
        "chunk placement from int8", moved * (1 + item),
        lambda: place_chunks(small, starts, *tables, k[0], v[0], factors),
    )  # fmt: skip

    question = random(Q_HEADS, QUESTION_ROWS, DIM)
    asking = torch.arange(keys - QUESTION_ROWS, keys, device=device)
    yield from pair("token scores", 2.0 * k[0].nbytes, lambda: token_scores(question, k[0], asking, scale))

    rows = torch.arange(keys, device=device)
    fresh = random(2, KV_HEADS, keys, DIM)
    yield from pair("KV deviation", 4.0 * k[0].nbytes, lambda: kv_deviation(*fresh, k[0], v[0], rows, rows))
