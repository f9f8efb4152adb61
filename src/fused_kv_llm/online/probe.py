"""The probe: a cheap forward of the question that scores the context tokens.

FusionRAG section 3.2 prefills the question alone; ProphetKV lets it attend to the whole context; QCFuse
(section 3) looks at a few layers only. Here one pass serves all: it stops after the last layer that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fused_kv_llm.model import (
    AttentionRule,
    ForwardPass,
    LayerFiller,
    LoadedModel,
    StopForwardError,
    forward_kv,
    pause_at,
)
from fused_kv_llm.selectors import View

from .anchors import ChunkAnchors
from .request import Request
from .request_kv import RequestKV

__all__ = ["QuestionProbe"]

_Keys = Callable[[int, Tensor], Tensor]
"""From a layer's index and the keys that the question sees there, to the keys that are scored ``[Hkv, N, D]``."""


class _ProbePass(ForwardPass):
    """Attends to the visible keys, scores all available ones in the view's layers, and ends after the last of them."""

    def __init__(
        self, view: View, available: Tensor, indices: Tensor, keys: _Keys, rows: Tensor, visible: int | Tensor,
        fillers: Sequence[LayerFiller] = (), key_positions: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rows, visible, fillers, key_positions=key_positions)
        self.layers = view.layers
        self.available = available
        self.indices = indices
        self.keys = keys

    def begin(self) -> None:
        """Expect the first layer, or the one that the probe was left before."""
        super().begin()
        if self.next_layer == 0:
            self.scores: list[Tensor] = []

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Score the context where the view asks for it; return the attention output, or end the forward."""
        if layer_idx in self.layers:
            question = q[0, :, -self.indices.shape[0] :]
            first = rule.mask.first_keys(self.available[self.indices], self.available, self.indices)
            self.scores.append(rule.scores(question, self.keys(layer_idx, k[0]), self.indices, first))
        if layer_idx == self.layers[-1]:
            raise StopForwardError
        return super().attend(layer_idx, q, k, v, rule)


class QuestionProbe:
    """Scores every reusable chunk token by the question's attention to it.

    Parameters
    ----------
    loaded : LoadedModel
    request : Request
    kv : RequestKV
        Its cache holds the prefix; its fillers bring the chunks, unless the view has anchors. What the probe writes
        behind the prefix, the question's rows among it, the fillers and the fused pass overwrite.
    view : View
        Layers to look at, and whether the question sees the chunks on its way.
    anchors : ChunkAnchors or None
        What a view with anchors sees of the chunks.
    """

    def __init__(
        self, loaded: LoadedModel, request: Request, kv: RequestKV, view: View, anchors: ChunkAnchors | None = None
    ) -> None:
        self._loaded, self._cache, device = loaded, kv.cache, loaded.device
        rows, question = request.question_rows()
        prefix = torch.arange(request.seen_tokens)
        chunk = request.chunk_positions
        available = torch.cat((prefix, chunk, rows)).sort().values
        seen = () if anchors is None else anchors.positions
        visible = available if view.full_context else torch.cat((prefix, *seen, rows)).sort().values
        indices = torch.searchsorted(available, rows[-question:]).to(device)
        self._rows, self._ids = rows.to(device), torch.tensor(request.ids)[rows][None].to(device)
        self._of_chunks = torch.searchsorted(available, chunk)
        if anchors is None:
            keys = _of_whole_layers(kv, view, available.to(device))
            fillers = kv.fillers if view.full_context else ()
            self._pass = _ProbePass(view, available.to(device), indices, keys, self._rows, visible.to(device), fillers)
            return
        at = torch.searchsorted(visible, rows).to(device)
        scored = anchors.place(kv.cache, visible, available)
        scored[:, :, : request.seen_tokens] = kv.cache.keys[list(view.layers), 0, :, : request.seen_tokens]
        keys = _of_sidecars(scored, view, torch.searchsorted(available, rows).to(device), at)
        positions = visible.to(device)
        self._pass = _ProbePass(
            view, available.to(device), indices, keys, at, visible.shape[0], key_positions=positions
        )

    def scores(self, pause_at_s: float = float("inf")) -> Tensor:
        """Run the probe, or go on with it.

        Parameters
        ----------
        pause_at_s : float
            ``time.perf_counter()`` at which it is left, see :func:`fused_kv_llm.model.pause_at`.

        Returns
        -------
        Tensor
            float32 ``[len(view.layers), C]``, by layer, aligned with ``request.chunk_positions``.

        Raises
        ------
        PausedError
            If it was left.
        """
        pause_at(self._loaded, self._pass, pause_at_s)
        forward_kv(self._loaded, self._ids, self._rows, self._cache, self._pass)
        return torch.stack(self._pass.scores).cpu()[:, self._of_chunks]


def _of_whole_layers(kv: RequestKV, view: View, available: Tensor) -> _Keys:
    """Return a function that gives a layer's available keys after its whole stored KV was put in place."""

    def keys(layer_idx: int, visible: Tensor) -> Tensor:
        if view.full_context:
            return visible
        for filler in kv.fillers:
            filler.fill(layer_idx)
        own: Tensor = kv.cache.layers[layer_idx].keys[0]
        return own.index_select(1, available)

    return keys


def _of_sidecars(scored: Tensor, view: View, to: Tensor, at: Tensor) -> _Keys:
    """Return a function that gives a layer's available keys: those from sidecars, with the question's rows added."""

    def keys(layer_idx: int, visible: Tensor) -> Tensor:
        heads, _, dim = visible.shape
        layer = scored[view.layers.index(layer_idx), :heads, :, :dim]
        return layer.index_copy_(1, to, visible.index_select(1, at))

    return keys
