"""Passes of several requests as one: linear layers run once over the rows of all, attention by request.

Each request has a cache and a pass of its own, as if it ran alone; only the rows stand one behind another. Rows attend
by true position in their own cache, so what a request gets does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from fused_kv_llm.model.attention import check_attached
from fused_kv_llm.model.attention_rule import AttentionRule
from fused_kv_llm.model.cache import FusedCache
from fused_kv_llm.model.forward import forward_rows
from fused_kv_llm.model.loading import LoadedModel
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
    """

    ids: Tensor
    cache: FusedCache
    forward_pass: ForwardPass


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
    """Hands every request its rows."""

    def __init__(self, parts: Sequence[RaggedPart]) -> None:
        self.parts = parts
        bounds = [0, *accumulate(part.ids.shape[0] for part in parts)]
        self.spans = [slice(*pair) for pair in pairwise(bounds)]
        self.num_rows = bounds[-1]
        if self.num_rows > len(parts):
            self.final_rows = torch.tensor(bounds[1:], device=parts[0].ids.device) - 1
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.begin()

    def write(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Give every request's cache its rows of a layer's keys and values ``[1, Hkv, R, D]``."""
        self.enter_layer(layer_idx)
        self._seen[layer_idx] = [
            _of_part(index, part.cache.layers[layer_idx].write, part.forward_pass, keys[:, :, span], values[:, :, span])
            for index, (part, span) in enumerate(zip(self.parts, self.spans, strict=True))
        ]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output ``[1, Hq, R, Dv]``; the keys and values are those of the caches."""
        seen = self._seen[self.kv_layer]
        width = seen[0][1].shape[-1]
        # Laid out as an output projection reads it.
        out = q.new_empty(1, self.num_rows, q.shape[1], width).transpose(1, 2)
        for index, (part, span) in enumerate(zip(self.parts, self.spans, strict=True)):
            attend = part.forward_pass.attend
            out[:, :, span] = _of_part(index, attend, layer_idx, q[:, :, span], *seen[index], rule)
        return out


def _of_part(index: int, run: Callable[..., _T], *args: object) -> _T:
    try:
        return run(*args)
    except Exception as error:
        raise RaggedError(index, error) from error


class _RaggedLayer(CacheLayerMixin):
    """One layer of a :class:`_RaggedCache`."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers are the requests'."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hand the rows on; what is returned is not looked at."""
        forward_pass = required_pass(_RaggedPass)
        forward_pass.write(self.layer_idx, key_states, value_states)
        return forward_pass.given((key_states, value_states))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length a mask would need; fused passes use none."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return no length: every request has its own."""
        return 0

    def get_max_length(self) -> int:
        """Return no capacity: every request has its own."""
        return -1


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
    if alone or len(parts) == 1:
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
