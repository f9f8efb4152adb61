"""Passes of several requests as one: linear layers run once over the rows of all, attention by request.

Each request has a cache and a pass of its own, as if it ran alone; only the rows stand one behind another. Rows attend
by true position in their own cache, so what a request gets does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fused_kv_kernels import DecodeCaches, DecodeViews, LayerWeights, decode_attention, decode_layers, decode_views
from fused_kv_llm.model.attention import check_attached
from fused_kv_llm.model.attention_rule import AttentionRule
from fused_kv_llm.model.cache import PassLayer
from fused_kv_llm.model.forward import forward_rows
from fused_kv_llm.model.loading import LoadedModel
from fused_kv_llm.model.mask import MaskRule
from fused_kv_llm.model.narrowing import NarrowingPass
from fused_kv_llm.model.numbers import check_logits
from fused_kv_llm.model.pass_context import LayerPass, required_pass
from fused_kv_llm.model.ragged_part import PartKind, RaggedPart
from fused_kv_llm.model.seam import run_model
from fused_kv_llm.model.view_cache import ViewCache

__all__ = ["RaggedError", "forward_ragged"]

_T = TypeVar("_T")


class RaggedError(Exception):
    """A part of a ragged pass failed; the others may be run again without it.

    Parameters
    ----------
    index : int
        Which part.
    cause : Exception
        Why.
    """

    def __init__(self, index: int, cause: Exception) -> None:
        super().__init__(index, cause)
        self.index = index
        self.cause = cause


class _RaggedPass(LayerPass):
    """Hands every request its rows; the answers' next tokens, which come first, are attended in one call a layer.

    Parameters
    ----------
    parts : sequence of (int, RaggedPart)
        Each with its index, by which an error names it; in the order of their kinds.
    """

    def __init__(self, parts: Sequence[tuple[int, RaggedPart]]) -> None:
        self.parts = [part for _, part in parts]
        kinds = [part.kind for part in self.parts]
        bounds = [0, *accumulate(part.ids.shape[0] for part in self.parts)]
        self.spans = [slice(*pair) for pair in pairwise(bounds)]
        self.num_rows = bounds[-1]
        if self.num_rows > len(parts):
            self.final_rows = torch.tensor(bounds[1:], device=self.parts[0].ids.device) - 1
        caches, views = ([part for part, its in zip(self.parts, kinds, strict=True) if its == kind]
                         for kind in (PartKind.CACHE, PartKind.VIEW))  # fmt: skip
        self._cached, self._viewed = slice(0, len(caches)), slice(len(caches), len(caches) + len(views))
        self._alone = list(zip(parts, self.spans, strict=True))[self._viewed.stop :]
        self._in_caches = caches
        self._caches = DecodeCaches(
            [(part.cache.keys, part.cache.values) for part in caches], [part.position for part in caches]
        )
        shared = [(part.cache, part.position) for part in views]
        self._views = DecodeViews(
            [cache.view for cache, _ in shared if isinstance(cache, ViewCache)],
            [position - cache.shown_tokens for cache, position in shared if isinstance(cache, ViewCache)],
        )
        self.decodes = len(caches) == len(parts)
        self._windows: dict[MaskRule, Tensor | None] = {}
        self._fresh: tuple[Tensor, Tensor] | None = None
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.begin()

    def write(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Give every request's cache its rows of a layer's keys and values ``[1, Hkv, R, D]``."""
        self.enter_layer(layer_idx)
        # What is attended together is written together too.
        self._fresh = keys, values
        self._seen[layer_idx] = [
            _of_part(index, part.cache.layers[layer_idx].write, part.forward_pass, keys[:, :, span], values[:, :, span])
            for (index, part), span in self._alone
        ]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output ``[1, Hq, R, Dv]``; the keys and values are those of the caches."""
        together = [
            (rows, attend(layer_idx, q[:, :, rows], rule))
            for rows, attend in ((self._cached, self._attend_caches), (self._viewed, self._attend_views))
            if rows.stop > rows.start
        ]
        if len(together) == 1 and not self._alone:
            return together[0][1]
        seen = self._seen[self.kv_layer]
        # Laid out as an output projection reads it.
        value_dim = together[0][1].shape[3] if together else seen[0][1].shape[-1]
        out = q.new_empty(1, self.num_rows, q.shape[1], value_dim).transpose(1, 2)
        for rows, attended in together:
            out[:, :, rows] = attended
        for ((index, part), span), pair in zip(self._alone, seen, strict=True):
            attend = part.forward_pass.attend
            out[:, :, span] = _of_part(index, attend, layer_idx, q[:, :, span], *pair, rule)
        return out

    def decode(
        self, hidden: Tensor, layers: Sequence[LayerWeights], cos: Tensor, sin: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Run decoder layers without softcap and sinks on the answers' next tokens."""
        first_keys = self._window(rule.mask)
        return decode_layers(hidden, layers, self._caches, self.next_layer, cos, sin, rule.scale, first_keys=first_keys)

    def _attend_caches(self, layer_idx: int, q: Tensor, rule: AttentionRule) -> Tensor:
        return decode_attention(
            q, *self._fresh_rows(layer_idx, self._cached), self._caches, layer_idx, rule.scale,
            softcap=rule.softcap, sinks=rule.sinks, first_keys=self._window(rule.mask),
        )  # fmt: skip

    def _attend_views(self, layer_idx: int, q: Tensor, rule: AttentionRule) -> Tensor:
        fresh = self._fresh_rows(layer_idx, self._viewed)
        return decode_views(q, *fresh, self._views, layer_idx, rule.scale, softcap=rule.softcap, sinks=rule.sinks)

    def _fresh_rows(self, layer_idx: int, rows: slice) -> tuple[Tensor, Tensor]:
        if self._fresh is None:
            raise RuntimeError(f"layer {layer_idx} attends before its keys and values were given")
        keys, values = self._fresh
        return keys[:, :, rows], values[:, :, rows]

    def _window(self, mask: MaskRule) -> Tensor | None:
        if mask not in self._windows:
            self._windows[mask] = _first_keys(self._in_caches, mask)
        return self._windows[mask]


def _first_keys(parts: Sequence[RaggedPart], mask: MaskRule) -> Tensor | None:
    """Return the first key that each part's row sees, int64; None if all see the first one."""
    firsts = [part.forward_pass.plans(mask)[0].first_keys for part in parts]
    if all(first is None for first in firsts):
        return None
    return torch.tensor([0 if first is None else int(first[0]) for first in firsts], device=parts[0].ids.device)


def _of_part(index: int, run: Callable[..., _T], *args: object) -> _T:
    try:
        return run(*args)
    except RaggedError as error:
        raise RaggedError(index, error.cause) from error.cause
    except Exception as error:
        raise RaggedError(index, error) from error


class _RaggedLayer(PassLayer):
    """One layer of a cache that hands every request its rows."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hand the rows on; what is returned is not looked at."""
        forward_pass = required_pass(_RaggedPass)
        forward_pass.write(self.layer_idx, key_states, value_states)
        return forward_pass.given((key_states, value_states))


def forward_ragged(loaded: LoadedModel, parts: Sequence[RaggedPart]) -> list[Tensor]:
    """Run the model once for several requests.

    Parameters
    ----------
    loaded : LoadedModel
    parts : sequence of RaggedPart

    Returns
    -------
    list of Tensor
        By part, float32 ``[vocabulary]``: the logits after its last row.

    Raises
    ------
    RaggedError
        If one part failed, with the reason. What the others have written they write again when they are run again.
    ConfigError, UnsupportedModelError
        As :func:`forward_rows`.
    """
    alone = not loaded.geometry.attends_cache or any(isinstance(p.forward_pass, NarrowingPass) for p in parts)
    if alone or (len(parts) == 1 and parts[0].kind == PartKind.ALONE):
        return [_of_part(index, _forward_alone, loaded, part) for index, part in enumerate(parts)]
    check_attached(loaded.model, loaded.model_id)
    ordered = sorted(enumerate(parts), key=lambda one: one[1].kind)
    forward_pass = _RaggedPass(ordered)
    cache = Cache(layers=[_RaggedLayer(idx) for idx in range(loaded.geometry.num_layers)])
    ids = torch.cat([part.ids for _, part in ordered])[None]
    positions = torch.cat([part.forward_pass.rows for _, part in ordered])
    logits = run_model(loaded.model, ids, positions, cache, forward_pass)[0].float()
    found = dict[int, Tensor]()
    for (index, part), own in zip(ordered, logits, strict=True):
        layers = [(layer.keys, layer.values) for layer in part.cache.layers]
        rows = part.cache.own_rows(part.forward_pass.rows)
        _of_part(index, check_logits, own, layers, loaded.model_id, loaded.dtype, rows)
        found[index] = own
    return [found[index] for index in range(len(parts))]


def _forward_alone(loaded: LoadedModel, part: RaggedPart) -> Tensor:
    if isinstance(part.cache, ViewCache):
        return forward_ragged(loaded, [part])[0]
    return forward_rows(loaded, part.ids[None], part.forward_pass.rows, part.cache, part.forward_pass)[-1]
