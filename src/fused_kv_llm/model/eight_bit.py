"""A model's linear layers in eight bits, for forwards whose results only correct others.

For models on a CPU, in float32 with AVX2 or in bfloat16 with instructions for it. The second pass of ingestion uses
them: what it finds is stored in eight bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_kv_kernels import (
    EightBitWeights,
    Norm,
    eight_bit_attended_mlp,
    eight_bit_gated_mlp,
    eight_bit_linears,
    eight_bit_weights,
    has_eight_bit_linears,
    why_not_native,
)
from fused_kv_llm.model.cache import FusedCache
from fused_kv_llm.model.cache_pool import CachePool
from fused_kv_llm.model.context_length import context_length
from fused_kv_llm.model.forward import forward_kv
from fused_kv_llm.model.forward_pass import KVPass
from fused_kv_llm.model.loading import LoadedModel
from fused_kv_llm.model.owner import ModelOwner, StoppedError

__all__ = ["EightBitLinears", "eight_bit_of"]

_SAMPLE = """On 14 March 2019 the harbour board met to discuss the new ferry. "We have 3 bids," said its chair, who had
held the office since 1998, "and the lowest is 42.5 million euros." The river, which is 310 km long, rises in the north
and reaches the sea near the old mill. Its first bridge was built in 1887; the second one was never finished.

Step 1: open the valve slowly. Step 2: read the pressure (p = F / A) and compare it with table 7. If it is above
2.4 bar, call the operator; otherwise go on. See also: maintenance, safety rules, error codes E10 to E27.

The album was released in the United States by a small label. Critics praised its second half, and it won two awards."""
_SAMPLE_TOKENS = 256
# Below it, rounding takes longer than it saves.
_LEAST_SIZE = 64


class EightBitLinears:
    """Computes linear layers in eight bits; what a :class:`.LayerPass` may have as its ``linears``.

    Parameters
    ----------
    weights : mapping of torch.nn.Module to EightBitWeights
        Of layers that read the same input, by the first of them. All others are the model's to compute.
    """

    def __init__(self, weights: Mapping[Any, EightBitWeights]) -> None:
        self._weights = weights

    def __call__(self, modules: Sequence[Any], x: Tensor) -> list[Tensor] | None:
        """Return the outputs ``[..., O]`` of layers that read the same input ``[..., I]``, or None."""
        weights = self._weights.get(modules[0])
        return None if weights is None else eight_bit_linears(x, weights)

    def gated_mlp(self, gate: Any, down: Any, x: Tensor) -> Tensor | None:
        """Return ``down(silu(gate(x)) * up(x))``, ``[..., O]``; None unless gate and up were rounded together."""
        gate_up, last = self._weights.get(gate), self._weights.get(down)
        if gate_up is None or last is None or len(gate_up.sizes) != 2:
            return None
        return eight_bit_gated_mlp(x, gate_up, last)

    def normed(self, modules: Sequence[Any], x: Tensor, norm: Norm) -> list[Tensor] | None:
        """Return the outputs ``[..., O]`` of layers that read ``rms_norm(x)``, or None."""
        weights = self._weights.get(modules[0])
        return None if weights is None else eight_bit_linears(x, weights, norm)

    def attended_mlp(self, layer: Any, x: Tensor, attended: Tensor, norm: Norm) -> Tensor | None:
        """Return the second half of a decoder layer, ``[..., H]``; None unless all its linear layers were rounded."""
        mlp = layer.mlp
        output, gate_up, last = map(self._weights.get, (layer.self_attn.o_proj, mlp.gate_proj, mlp.down_proj))
        if output is None or gate_up is None or last is None or len(gate_up.sizes) != 2:
            return None
        return eight_bit_attended_mlp(x, attended, output, norm, gate_up, last)


def eight_bit_of(loaded: LoadedModel, owner: ModelOwner, stopped: Callable[[], bool]) -> EightBitLinears | None:
    """Return a model's linear layers in eight bits, or None where there are none.

    Making them takes a forward of some 200 tokens and one pass over the weights. They take a byte for each weight.

    Parameters
    ----------
    loaded : LoadedModel
    owner : ModelOwner
        Computes the forward; the weights are rounded in the calling thread.
    stopped : callable
        Asked before every layer.

    Raises
    ------
    StoppedError
        If it was stopped.
    """
    dtype = loaded.dtype
    if loaded.device.type != "cpu" or why_not_native(dtype) is not None or not has_eight_bit_linears(dtype):
        return None
    ids = _sample_ids(loaded)
    if len(ids) < 2:
        return None
    recording = owner.run(lambda: _recorded(loaded, ids), len(ids), stopped)
    weights = _rounded(loaded, recording, stopped)
    return EightBitLinears(weights) if weights else None


class _Recording:
    """Records the largest magnitudes of linear layers' inputs, and leaves the layers to the model."""

    def __init__(self) -> None:
        self.seen: dict[Any, tuple[Sequence[Any], Tensor]] = {}

    def __call__(self, modules: Sequence[Any], x: Tensor) -> None:
        # Without the first row, whose inputs are far larger than all others in many models (attention sinks).
        largest = x.flatten(0, -2)[1:].abs().amax(0)
        if modules[0] in self.seen:
            largest = torch.maximum(largest, self.seen[modules[0]][1])
        self.seen[modules[0]] = modules, largest

    def gated_mlp(self, gate: Any, down: Any, x: Tensor) -> None:
        """Leave an MLP to the model: its layers come one after another, and are recorded then."""

    def normed(self, modules: Sequence[Any], x: Tensor, norm: Norm) -> None:
        """Leave a norm to the model, and what comes behind it."""

    def attended_mlp(self, layer: Any, x: Tensor, attended: Tensor, norm: Norm) -> None:
        """Leave half a layer to the model."""


def _rounded(loaded: LoadedModel, recording: _Recording, stopped: Callable[[], bool]) -> dict[Any, EightBitWeights]:
    left_out, weights = _routers(loaded.model), dict[Any, EightBitWeights]()
    for first, (modules, largest) in recording.seen.items():
        if stopped():
            raise StoppedError
        sizes = [size for module in modules for size in module.weight.shape]
        # A part that the model keeps in another dtype has a reason for it.
        is_usual = all(module.weight.dtype == loaded.dtype for module in modules)
        if is_usual and first not in left_out and min(sizes) >= _LEAST_SIZE:
            weights[first] = eight_bit_weights([(module.weight, module.bias) for module in modules], largest)
    return weights


def _routers(model: Any) -> set[Any]:
    """Return what chooses experts: another choice would be no small error."""
    named = model.named_modules()
    return {module for name, module in named if "router" in name or name.endswith(".gate")}


def _sample_ids(loaded: LoadedModel) -> list[int]:
    """Return the sample's ids that the model knows, as many as it takes."""
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    ids = [one for one in loaded.tokenizer(_SAMPLE)["input_ids"] if 0 <= one < vocabulary]
    return ids[: min(_SAMPLE_TOKENS, context_length(loaded.model.config.get_text_config(), loaded.model_id))]


def _recorded(loaded: LoadedModel, ids: Sequence[int]) -> _Recording:
    loaded.check_unchanged()
    rows = torch.arange(len(ids))
    cache = FusedCache(loaded.geometry, len(ids), CachePool(loaded.dtype, loaded.device, max_bytes=0))
    forward_pass = KVPass(rows, len(ids), loaded.geometry.num_layers - 1)
    forward_pass.linears = recording = _Recording()
    try:
        with torch.inference_mode():
            forward_kv(loaded, torch.tensor([ids], dtype=torch.int64), rows, cache, forward_pass)
    finally:
        cache.release()
    return recording
