"""Shapes of models: what their weights, a token's KV and a token's forward amount to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SEVENTY_B", "SEVEN_B", "SHAPES", "SMOLLM2", "ModelShape"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's shape.

    Parameters
    ----------
    name : str
    params : float
        Weights that a token goes through.
    num_layers, num_heads, num_kv_heads, head_dim : int
    value_bytes : int
        Bytes of a number, in weights and KV.
    """

    name: str
    params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.value_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes that a pass reads at least."""
        return self.params * self.value_bytes

    @property
    def row_flops(self) -> float:
        """Operations of a row in the linear layers."""
        return 2.0 * self.params

    @property
    def pair_flops(self) -> float:
        """Operations of a row for each key that it attends to."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim


SMOLLM2 = ModelShape("SmolLM2-135M", 134.5e6, 30, 9, 3, 64)
SEVEN_B = ModelShape("7B", 6.7e9, 32, 32, 32, 128)
SEVENTY_B = ModelShape("70B", 69e9, 80, 64, 8, 128)
SHAPES = {shape.name: shape for shape in (SMOLLM2, SEVEN_B, SEVENTY_B)}
