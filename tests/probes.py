"""Probes of made-up requests."""

from __future__ import annotations

import torch

from fused_kv_llm.selectors import Probe


def make_probe(lengths: list[int], gap: int = 3, seed: int = 0) -> Probe:
    """Chunks of these lengths, `gap` fresh tokens between them, random scores of every kind."""
    positions, chunk, offset, start = [], [], [], 5
    for index, length in enumerate(lengths):
        positions += range(start, start + length)
        chunk += [index] * length
        offset += range(length)
        start += length + gap
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(4 + len(lengths), len(positions), generator=generator)
    # All of every chunk is to be fixed, so that the budget is what limits it.
    overhead = torch.ones(len(lengths), dtype=torch.float64)
    return Probe(
        torch.tensor(positions), torch.tensor(chunk), torch.tensor(offset), drawn[0], seed,
        deviation=drawn[1], received=drawn[2], received_within=drawn[3], given=drawn[4:].T.contiguous(),
        overhead=overhead, recorded=drawn[0],
    )  # fmt: skip
