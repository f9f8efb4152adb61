"""Weights in eight bits for tests, and how far a result is off."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_kv_kernels import EightBitWeights, eight_bit_weights


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(outputs: int, inputs: int, seed: int = 0) -> EightBitWeights:
    """The weights of one layer without a bias."""
    return eight_bit_weights([(random(outputs, inputs, seed=seed), None)], torch.ones(inputs))


def mlp_of(inner: int, width: int) -> tuple[EightBitWeights, EightBitWeights]:
    """The weights of a gate with up beside it, and of what reads their product."""
    gate_up = eight_bit_weights([(random(width, inner, seed=seed), None) for seed in (1, 2)], torch.ones(inner))
    return gate_up, weights_of(32, width, seed=3)


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())
