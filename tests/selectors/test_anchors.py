"""Equation 14 of QCFuse: the best ceil(r_a |c_i|) tokens of a chunk, by each rule's ranking G_i, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fused_kv_llm.selectors import anchor_positions, knorm_scores, sink_scores


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.25, 0.5, 1.0])
def test_anchors_are_the_best_of_a_chunk(ratio: float) -> None:
    ranking = [0.3, 0.9, 0.1, 0.9, 0.5, 0.2, 0.8]
    count = math.ceil(ratio * len(ranking))
    best = sorted(range(len(ranking)), key=lambda r: (-ranking[r], r))[:count]
    assert anchor_positions(torch.tensor(ranking), ratio).tolist() == sorted(best)


def test_sink_ranks_the_first_tokens_first() -> None:
    assert anchor_positions(sink_scores(9), 0.3).tolist() == [0, 1, 2]


def test_knorm_ranks_by_the_norm_of_keys_averaged_over_layers_and_heads() -> None:
    # One layer of two heads: norms 5 and 1, 1 and 1, 0 and 2; their means 3, 1 and 1 but for rounding.
    keys = torch.tensor([[[[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 1.0], [0.0, 2.0]]]])
    assert knorm_scores(keys).tolist() == [-3.0, -1.0, -1.0]
    assert anchor_positions(knorm_scores(keys), 0.3).tolist() == [1], "knorm: the lowest first"
    assert anchor_positions(-knorm_scores(keys), 0.3).tolist() == [0], "knorm_high: the highest first"
