"""The memory-bound operators, each against torch: decoding, pages, chunk placement, token scores, KV deviation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fused_kv_kernels import (
    PageTable,
    RowPlan,
    SharedPages,
    kv_deviation,
    paged_row_attention,
    place_chunks,
    rotation_table,
    row_attention,
    token_scores,
)

from .clock import host_s, median_s

__all__ = ["measure_others"]

Q_HEADS, KV_HEADS, DIM = 28, 4, 128
CHUNK_TOKENS, QUESTION_ROWS, PAGE = 512, 32, 64
SCALE = DIM**-0.5
INV_FREQ = 1.0 / 10000 ** (torch.arange(0, DIM, 2) / DIM)

Records = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Context:
    """What all operators of one context length are measured on: `keys` and `values` are ``[B, Hkv, N, D]``."""

    keys: Tensor
    values: Tensor

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    @property
    def batch(self) -> int:
        return self.keys.shape[0]

    @property
    def chunk_starts(self) -> range:
        """Where the chunks begin: as many as there is room for."""
        return range(0, self.length - CHUNK_TOKENS + 1, CHUNK_TOKENS)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.keys.dtype)

    def pair(self, operator: str, nbytes: float, run: Callable[[], object], other: str = "plain torch",
             against: Callable[[], object] | None = None) -> Records:  # fmt: skip
        """Yield the records of an operator and of what it is measured against: without `against`, itself in torch."""
        sizes = {"operator": operator, "keys": self.length, "batch": self.batch, "ratio": None}

        def record(what: str, call: Callable[[], object]) -> dict[str, Any]:
            seconds = median_s(call)
            return {**sizes, "what": what, "seconds": seconds, "host_s": host_s(call), "bytes_per_s": nbytes / seconds}

        yield record(operator, run)
        with _in_torch():
            yield record(other, against or run)


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


def measure_others(keys: int, batch: int, device: torch.device, dtype: torch.dtype) -> Records:
    """Yield one record a contestant at one context length."""
    shape = (batch, KV_HEADS, keys, DIM)
    context = _Context(*(torch.randn(shape, device=device).to(dtype) for _ in range(2)))
    for measure in (_decoding, _pages, _placement, _scores, _deviation):
        yield from measure(context)


def _decoding(context: _Context) -> Records:
    q, k, v = context.random(context.batch, Q_HEADS, 1, DIM), context.keys, context.values
    plan = RowPlan(torch.tensor([context.length - 1], device=context.device), context.length)
    yield from context.pair(
        "decoding", 2.0 * k.nbytes, lambda: row_attention(q, k, v, plan, SCALE),
        "SDPA", lambda: sdpa(q, k, v, scale=SCALE, enable_gqa=True),
    )  # fmt: skip


def _pages(context: _Context) -> Records:
    """Decoding of requests that share all chunks. Without pages each holds its own copy: SDPA reads that."""
    batch, length, device = context.batch, context.length, context.device
    q, k, v = context.random(batch, Q_HEADS, 1, DIM), context.keys, context.values
    pages = length // PAGE
    pool = context.random(2, pages + batch, KV_HEADS, PAGE, DIM)
    chunks = [
        SharedPages(range(at // PAGE, (at + CHUNK_TOKENS) // PAGE), CHUNK_TOKENS, at, at) for at in context.chunk_starts
    ]
    table = PageTable([chunks] * batch, [[pages + request] for request in range(batch)], PAGE, INV_FREQ, device)
    for request in range(batch):
        table.take(request, [length])
    beyond = torch.tensor([length], device=device)
    yield from context.pair(
        "decoding over shared pages", 2.0 * k.nbytes,
        lambda: paged_row_attention(q, *pool, table, beyond, SCALE),
        "SDPA over copies", lambda: sdpa(q, k, v, scale=SCALE, enable_gqa=True),
    )  # fmt: skip


def _placement(context: _Context) -> Records:
    starts, item, device = list(context.chunk_starts), context.keys.element_size(), context.device
    layer = context.keys[0], context.values[0]
    table = rotation_table(torch.tensor(starts), INV_FREQ).to(device)
    shape = (KV_HEADS, CHUNK_TOKENS, DIM)
    stored = [(context.random(*shape), context.random(*shape)) for _ in starts]
    moved = 2.0 * KV_HEADS * len(starts) * CHUNK_TOKENS * DIM
    yield from context.pair(
        "chunk placement", moved * 2 * item, lambda: place_chunks(stored, starts, table, *layer)
    )  # fmt: skip
    small = [tuple((30 * part).to(torch.int8) for part in both) for both in stored]
    scale_shapes = ((KV_HEADS, 1, DIM), (KV_HEADS, CHUNK_TOKENS, 1))
    factors = [tuple(torch.rand(shape, device=device).half() for shape in scale_shapes) for _ in starts]
    yield from context.pair(
        "chunk placement from int8", moved * (1 + item),
        lambda: place_chunks(small, starts, table, *layer, factors),
    )  # fmt: skip


def _scores(context: _Context) -> Records:
    question, k = context.random(Q_HEADS, QUESTION_ROWS, DIM), context.keys[0]
    asking = torch.arange(context.length - QUESTION_ROWS, context.length, device=context.device)
    yield from context.pair("token scores", 2.0 * k.nbytes, lambda: token_scores(question, k, asking, SCALE))


def _deviation(context: _Context) -> Records:
    stored = context.keys[0], context.values[0]
    rows = torch.arange(context.length, device=context.device)
    fresh = context.random(2, KV_HEADS, context.length, DIM)
    yield from context.pair("KV deviation", 4.0 * stored[0].nbytes, lambda: kv_deviation(*fresh, *stored, rows, rows))
