"""Passes of several requests as one: linear layers run once over the rows of all, attention by request.

Each request has a cache and a pass of its own, as if it ran alone; only the rows stand one behind another. Rows attend
by true position in their own cache, so what a request gets does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fused_kv_kernels import DecodeCaches, LayerWeights, decode_attention, decode_layers
from fused_kv_llm.model.attention import check_attached
from fused_kv_llm.model.attention_rule import AttentionRule
from fused_kv_llm.model.cache import FusedCache, PassLayer
from fused_kv_llm.model.forward import forward_rows
from fused_kv_llm.model.loading import LoadedModel
from fused_kv_llm.model.mask import MaskRule
from fused_kv_llm.model.narrowing import NarrowingPass
from fused_kv_llm.model.numbers import check_logits
from fused_kv_llm.model.pass_context import ForwardPass, LayerPass, required_pass
from fused_kv_llm.model.seam import run_model

__all__ = ["RaggedError", "RaggedPart", "forward_ragged"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RaggedPart:
    """What one request has computed.

    Parameters
    ----------
    ids : Tensor
        int64 ``[R]``: the tokens of its rows.
    cache : FusedCache
    forward_pass : ForwardPass
        Over that cache. Of several rows, only the last one's logits are wanted.

    Notes
    -----
    Parts of one row that come before all others, the next tokens of answers, are attended together.
    """

    ids: Tensor
    cache: FusedCache
    forward_pass: ForwardPass

    @property
    def position(self) -> int:
        """Where its first row stands."""
        return int(self.forward_pass.rows[0])


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
    """Hands every request its rows; the answers' next tokens, which come first, are attended in one call a layer."""

    def __init__(self, parts: Sequence[RaggedPart]) -> None:
        self.parts = parts
        bounds = [0, *accumulate(part.ids.shape[0] for part in parts)]
        self.spans = [slice(*pair) for pair in pairwise(bounds)]
        self.num_rows = bounds[-1]
        if self.num_rows > len(parts):
            self.final_rows = torch.tensor(bounds[1:], device=parts[0].ids.device) - 1
        decoding = list(takewhile(_is_decoding, parts))
        self._num_decoding = len(decoding)
        self._caches = DecodeCaches(
            [(part.cache.keys, part.cache.values) for part in decoding], [part.position for part in decoding]
        )
        self.decodes = len(decoding) == len(parts)
        self._windows: dict[MaskRule, Tensor | None] = {}
        self._fresh: tuple[Tensor, Tensor] | None = None
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.begin()

    def write(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Give every request's cache its rows of a layer's keys and values ``[1, Hkv, R, D]``."""
        self.enter_layer(layer_idx)
        count = self._num_decoding
        if count:
            self._fresh = keys[:, :, :count], values[:, :, :count]
        self._seen[layer_idx] = [
            _of_part(index, part.cache.layers[layer_idx].write, part.forward_pass, keys[:, :, span], values[:, :, span])
            for index, part, span in self._other_parts()
        ]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output ``[1, Hq, R, Dv]``; the keys and values are those of the caches."""
        decoded = self._attend_decoding(layer_idx, q, rule) if self._num_decoding else None
        if decoded is not None and self._num_decoding == len(self.parts):
            return decoded
        seen = self._seen[self.kv_layer]
        # Laid out as an output projection reads it.
        out = q.new_empty(1, self.num_rows, q.shape[1], seen[0][1].shape[-1]).transpose(1, 2)
        if decoded is not None:
            out[:, :, : self._num_decoding] = decoded
        for (index, part, span), pair in zip(self._other_parts(), seen, strict=True):
            attend = part.forward_pass.attend
            out[:, :, span] = _of_part(index, attend, layer_idx, q[:, :, span], *pair, rule)
        return out

    def decode(
        self, hidden: Tensor, layers: Sequence[LayerWeights], cos: Tensor, sin: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Run decoder layers without softcap and sinks on the answers' next tokens."""
        first_keys = self._window(rule.mask)
        return decode_layers(hidden, layers, self._caches, self.next_layer, cos, sin, rule.scale, first_keys=first_keys)

    def _attend_decoding(self, layer_idx: int, q: Tensor, rule: AttentionRule) -> Tensor:
        if self._fresh is None:
            raise RuntimeError(f"layer {layer_idx} attends before its keys and values were given")
        return decode_attention(
            q[:, :, : self._num_decoding], *self._fresh, self._caches, layer_idx, rule.scale,
            softcap=rule.softcap, sinks=rule.sinks, first_keys=self._window(rule.mask),
        )  # fmt: skip

    def _window(self, mask: MaskRule) -> Tensor | None:
        if mask not in self._windows:
            self._windows[mask] = _first_keys(self.parts[: self._num_decoding], mask)
        return self._windows[mask]

    def _other_parts(self) -> Iterator[tuple[int, RaggedPart, slice]]:
        """Yield the parts that are not attended together, with their index and their rows."""
        for index in range(self._num_decoding, len(self.parts)):
            yield index, self.parts[index], self.spans[index]


def _is_decoding(part: RaggedPart) -> bool:
    """Return whether a part is an answer's next token, in a cache that is laid out as decode attention takes it."""
    geometry, forward_pass = part.cache.geometry, part.forward_pass
    alike = all(shape == geometry.room for shape in geometry.shapes) and not geometry.swaps
    own_kv = geometry.last_layer == geometry.num_layers - 1
    whole = type(forward_pass) is ForwardPass and not forward_pass.fillers and forward_pass.key_positions is None
    sees_all = isinstance(forward_pass.visible, int) and forward_pass.visible == part.position + 1
    return alike and own_kv and whole and sees_all and part.ids.shape[0] == 1


def _first_keys(parts: Sequence[RaggedPart], mask: MaskRule) -> Tensor | None:
    """Return the first key that each part's row sees, int64; None if all see the first one."""
    firsts = [part.forward_pass.plans(mask)[0].first_keys for part in parts]
    if all(first is None for first in firsts):
        return None
    return torch.tensor([0 if first is None else int(first[0]) for first in firsts], device=parts[0].ids.device)


def _of_part(index: int, run: Callable[..., _T], *args: object) -> _T:
    try:
        return run(*args)
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
    if alone or (len(parts) == 1 and not _is_decoding(parts[0])):
        return [_of_part(index, _forward_alone, loaded, part) for index, part in enumerate(parts)]
    check_attached(loaded.model, loaded.model_id)
    forward_pass = _RaggedPass(parts)
    cache = Cache(layers=[_RaggedLayer(idx) for idx in range(loaded.geometry.num_layers)])
    ids = torch.cat([part.ids for part in parts])[None]
    positions = torch.cat([part.forward_pass.rows for part in parts])
    logits = run_model(loaded.model, ids, positions, cache, forward_pass)[0].float()
    for index, (part, own) in enumerate(zip(parts, logits, strict=True)):
        layers = [(layer.keys, layer.values) for layer in part.cache.layers]
        _of_part(index, check_logits, own, layers, loaded.model_id, loaded.dtype, part.forward_pass.rows)
    return list(logits)


def _forward_alone(loaded: LoadedModel, part: RaggedPart) -> Tensor:
    return forward_rows(loaded, part.ids[None], part.forward_pass.rows, part.cache, part.forward_pass)[-1]
