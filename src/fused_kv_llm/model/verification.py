"""Checks when a model is loaded: that its KV can be moved, and that fused passes compute what the model computes.

Nothing is taken from a model's name. A few tokens are run through it at three places, the last at the end of its
context, and then once more as scattered rows over stored KV. What is found is the model's :class:`.Geometry`; what does
not hold is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_kv_llm.errors import UnsupportedModelError
from fused_kv_llm.model.attention import check_attached
from fused_kv_llm.model.attention_rule import AttentionRule
from fused_kv_llm.model.cache import BatchCache, FusedCache
from fused_kv_llm.model.cache_pool import CachePool
from fused_kv_llm.model.context_length import context_length
from fused_kv_llm.model.deviation import deviation, tolerance
from fused_kv_llm.model.forward_pass import ForwardPass
from fused_kv_llm.model.geometry import Geometry, KVShape, Rotation
from fused_kv_llm.model.mask import MaskRule
from fused_kv_llm.model.numbers import check_logits
from fused_kv_llm.model.rotation_probe import ProbedKV, find_rotations
from fused_kv_llm.model.seam import run_model

__all__ = ["read_geometry"]

_NUM_TOKENS = 12
_SCATTERED = (2, 5, 6, 9, 11)
_DISTANCE = 1013
# Windows and attention chunks are told apart by what these rows see, whatever the context's length.
_DESCRIBED_ROWS = tuple(sorted({size * part // 4 - 1 for size in (1 << n for n in range(4, 18)) for part in (3, 4)}))
# What models raise whose caches, masks or positions are not transformers' usual ones.
_CRASHES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


class _RulesPass(ForwardPass):
    """A forward pass that notes how every layer attends, and to keys and values of which shapes."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__(torch.arange(num_rows, device=device), num_rows)
        self.rules: list[AttentionRule] = []
        self.shapes: set[tuple[int, int]] = set()

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output."""
        self.rules.append(rule)
        self.shapes |= {(part.shape[1], part.shape[3]) for part in (k, v)}
        return super().attend(layer_idx, q, k, v, rule)


def read_geometry(model: Any, model_id: str) -> Geometry:
    """Find out how a model's KV is moved, and check that fused passes compute what the model computes.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model whose attention goes through the seam.
    model_id : str
        Its name, for messages.

    Returns
    -------
    Geometry

    Raises
    ------
    UnsupportedModelError
        If its KV cannot be moved, its masks hide more than a window does, a layer attends elsewhere, or a fused pass
        gives other logits than the model's own forward.
    """
    check_attached(model, model_id)
    try:
        return _read(model, model_id)
    except _CRASHES as error:
        raise UnsupportedModelError(
            f"The model {model_id!r} is not supported: a short pass through it ended with {type(error).__name__}: "
            f"{str(error)[:200]}"
        ) from error


def _read(model: Any, model_id: str) -> Geometry:
    length = context_length(model.config.get_text_config(), model_id)
    starts = sorted({0, min(_DISTANCE, length // 2), length - _NUM_TOKENS - 1})
    if starts[0] < 0 or len(starts) < 2:
        raise UnsupportedModelError(f"The model {model_id!r} is not supported: its context is {length} tokens long.")
    with torch.inference_mode():
        probes, shapes, seen = _probe(model, starts, model_id)
        rotations, swaps = find_rotations(model.get_decoder(), probes, model_id)
        for probe in probes[1:]:
            if float(deviation(probe.logits, probes[0].logits)) > tolerance(probe.keys.dtype):
                raise UnsupportedModelError(
                    f"The model {model_id!r} is not supported: the same tokens give other logits at position "
                    f"{probe.start} than at the start, so chunks cannot be moved."
                )
        # What the layers behind those with KV of their own see decides no KV, and nobody scores a context by it.
        rules = seen.rules[: len(shapes)]
        # Layers of one kind share a mask, and looking at one takes longer the longer the context is.
        hiding = {mask for mask in {rule.mask for rule in seen.rules} if mask.hides_from(length)}
        keys, values = probes[0].keys, probes[0].values
        if swaps:
            keys, values = values, keys
            shapes = [KVShape(shape.heads, shape.value_dim, shape.key_dim) for shape in shapes]
        geometry = Geometry(
            shapes=tuple(shapes),
            last_layer=len(seen.rules) - 1,
            rotations=rotations,
            rope_digest=_digest(rotations, rules, shapes),
            context_length=length,
            global_layers=tuple(number for number, rule in enumerate(rules) if rule.mask not in hiding),
            swaps=swaps,
            attends_cache=seen.shapes == {(heads, dim) for heads, *dims in shapes for dim in dims},
        )
        _check_rows(model, model_id, geometry, (keys, values))
    return geometry


def _ids(model: Any) -> Tensor:
    """Return int64 ``[1, n]``: tokens from all over the vocabulary, the same at every start."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    return torch.arange(1, _NUM_TOKENS + 1, device=model.device)[None] * 7919 % vocabulary


def _probe(model: Any, starts: Sequence[int], model_id: str) -> tuple[list[ProbedKV], list[KVShape], _RulesPass]:
    """Run the same tokens at several places, in one batch."""
    ids, device = _ids(model), model.device
    count = ids.shape[1]
    positions = torch.tensor(starts, device=device)[:, None] + torch.arange(count, device=device)
    cache = BatchCache(model.config.get_text_config().num_hidden_layers)
    forward_pass = _RulesPass(count, device)
    logits = run_model(model, ids.expand(len(starts), -1), positions, cache, forward_pass)
    cache.layers = _with_kv(cache.layers, model_id)
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    check_logits(logits, layers, model_id, model.dtype, torch.arange(count, device=device))
    shapes = [KVShape(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in layers]
    cache.room = KVShape(*map(max, zip(*shapes, strict=True)))
    probes = [
        ProbedKV(start, *cache.chunk(place, slice(0, count)), logits[place].float())
        for place, start in enumerate(starts)
    ]
    return probes, shapes, forward_pass


def _with_kv(layers: Sequence[Any], model_id: str) -> list[Any]:
    """Return the layers that cache KV: a model's first ones."""
    found = [layer for layer in layers if layer.keys is not None]
    fits = all(layer.keys.shape[1] == layer.values.shape[1] for layer in found)
    if not found or not fits or list(layers[: len(found)]) != found:
        raise UnsupportedModelError(
            f"The model {model_id!r} is not supported: layers that use other layers' KV stand before layers with KV of "
            "their own, or a layer has other numbers of keys than of values."
        )
    return found


def _check_rows(model: Any, model_id: str, geometry: Geometry, stored: tuple[Tensor, Tensor]) -> None:
    """Recompute scattered rows over stored KV, as fusion does, and compare with the model's own forward."""
    ids = _ids(model)
    positions = torch.arange(_NUM_TOKENS, device=ids.device)
    want = model(input_ids=ids, position_ids=positions[None], use_cache=False).logits[0, -1:].float()
    cache = FusedCache(geometry, _NUM_TOKENS, CachePool(model.dtype, ids.device))
    cache.keys[:, 0], cache.values[:, 0] = cache.padded(*stored)
    rows = torch.tensor(_SCATTERED, device=ids.device)
    fused = ForwardPass(rows, _NUM_TOKENS, final_layer=geometry.last_layer)
    got = run_model(model, ids[:, rows], rows, cache, fused)[0].float()
    gap, limit = float(deviation(got, want)), tolerance(model.dtype)
    if not gap <= limit:
        raise UnsupportedModelError(
            f"The model {model_id!r} is not supported: recomputed rows give other logits than its own forward (off by "
            f"{gap:.2f}, where rounding explains {limit}). A part of it was patched, or looks at more than attention "
            "shows it."
        )


def _digest(rotations: Sequence[Rotation], rules: Sequence[AttentionRule], shapes: Sequence[KVShape]) -> str:
    """Hash how keys are rotated and scaled, and what rows see: what the KV of the same weights depends on."""
    first_keys = {mask: _first_keys(mask) for mask in {rule.mask for rule in rules}}
    described = [
        {
            "inv_freq": hashlib.sha256(rotation.inv_freq.numpy().tobytes()).hexdigest(),
            "interleaved": rotation.interleaved,
            "first_keys": first_keys[rule.mask],
            "softcap": rule.softcap,
            "scale": rule.scale,
            "shape": list(shape),
        }
        for rotation, rule, shape in zip(rotations, rules, shapes, strict=True)
    ]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _first_keys(mask: MaskRule) -> list[int] | None:
    """Return the first key that rows see which stand at places of every size; None if they see all."""
    rows = torch.tensor(_DESCRIBED_ROWS)
    first = mask.first_keys(rows, torch.arange(_DESCRIBED_ROWS[-1] + 1), rows)
    return None if first is None else first.tolist()
