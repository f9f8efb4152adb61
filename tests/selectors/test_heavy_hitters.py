"""Prefill-H2O by hand: of each chunk its part of the budget, the tokens that its own tokens attend to most."""

from __future__ import annotations

import torch

from fused_kv_llm.selectors import Probe, resolve_selector


def test_every_chunk_gives_its_most_attended_tokens() -> None:
    chunk = torch.tensor([0, 0, 0, 0, 1, 1])
    positions = torch.arange(20, 26)
    # The second chunk's tokens receive more, and it gets no more than its third of the budget.
    received = torch.tensor([0.1, 0.4, 0.2, 0.3, 0.9, 0.8])
    probe = Probe(positions, chunk, positions - 20, received_within=received)
    assert resolve_selector("prefill_h2o").select(probe, 3).tolist() == [21, 23, 24]
