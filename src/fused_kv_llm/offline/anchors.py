"""Anchors: the few tokens of a chunk that stand for it when a question is probed (QCFuse section 3.3).

For every stored chunk the rule ranks its tokens, and a sidecar keeps what the probe will need: the keys and values
of the anchors in the layers below the last one that scores, and the keys of all tokens in the layers that score. The
probe then never reads the chunk's KV itself. Anchors that are to be shifted are stored twice: as the chunk's own KV has
them, and with most of the chunk's context shift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fused_kv_llm.context_shift import USUAL_WEIGHT
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model import (
    AttentionRule,
    CachePool,
    ForwardPass,
    FusedCache,
    LoadedModel,
    ModelOwner,
    PrefixKV,
    StopForwardError,
    attention_weights,
    forward_kv,
)
from fused_kv_llm.selectors import Anchors, View, anchor_positions, knorm_scores, sidecar_names, sink_scores
from fused_kv_llm.store import AnchorKV, AnchorLayout, KVStore, StoredKV

from .progress import PassCounts, progress_bar

__all__ = ["AnchorBuilder", "kvzip_scores"]

_OLD = "anchors-"
"""How names of version 0.1.0's anchors begin, which nobody reads any more."""

_REPEAT = "\n\nRepeat the previous context exactly.\n\n"


def kvzip_scores(
    loaded: LoadedModel, prefix: PrefixKV, stored: StoredKV, repeat_ids: Sequence[int], pool: CachePool
) -> Tensor:
    """Rank tokens by how much the model needs them to repeat the chunk (KVzip, Kim et al. 2025).

    After the prefix and the chunk's stored KV stands a request to repeat the context and the chunk once more. A
    token's score is the highest attention weight that it receives from any row of the repetition and any head,
    averaged over the layers.

    Parameters
    ----------
    loaded : LoadedModel
    prefix : PrefixKV
        KV of the prefix.
    stored : StoredKV
        The chunk.
    repeat_ids : sequence of int
        The request and the chunk's ids; the latter are the last ``stored.num_tokens``.
    pool : CachePool
        Where the working memory comes from.

    Returns
    -------
    Tensor
        float32 ``[tokens]``.
    """
    start_of_chunk, tokens = len(prefix.token_ids), stored.num_tokens
    count = start_of_chunk + tokens + len(repeat_ids)
    cache = FusedCache(loaded.geometry, count, pool)
    keys, values = (part.to(loaded.device) for part in stored.read_layers(0, stored.num_layers))
    for target, before, own in ((cache.keys, prefix.keys, keys), (cache.values, prefix.values, values)):
        target[:, 0, :, :start_of_chunk] = before
        target[:, 0, :, start_of_chunk : start_of_chunk + tokens] = own
    # The chunk's keys carry the positions of its prefill; only distances matter, so the repetition follows them.
    start = stored.position + tokens
    rows = torch.arange(start_of_chunk + tokens, count, device=loaded.device)
    repetition = _RepeatPass(rows, count, slice(start_of_chunk, start_of_chunk + tokens), stored.num_layers - 1)
    positions = torch.arange(start, start + len(repeat_ids), device=loaded.device)
    try:
        forward_kv(loaded, torch.tensor([list(repeat_ids)], device=loaded.device), positions, cache, repetition)
    finally:
        cache.release()
    return (repetition.total / stored.num_layers).cpu()


class _RepeatPass(ForwardPass):
    """The forward of the repetition: keeps the highest weight that each chunk token receives in a layer."""

    def __init__(self, rows: Tensor, num_keys: int, chunk: slice, last_layer: int) -> None:
        super().__init__(rows, num_keys)
        self.chunk, self.last_layer = chunk, last_layer
        self.total = torch.zeros(chunk.stop - chunk.start, device=rows.device)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output; end the forward after the last layer."""
        repeated = self.chunk.stop - self.chunk.start
        plan = self.plans(rule.mask)[0]
        span = slice(plan.num_rows - repeated, plan.num_rows)
        weights = attention_weights(q[0, :, span], k[0], plan, rule, span)
        self.total += weights[:, :, self.chunk].amax(dim=(0, 1))
        if layer_idx == self.last_layer:
            raise StopForwardError
        return super().attend(layer_idx, q, k, v, rule)


class AnchorBuilder:
    """Writes the sidecars of chunks that have none.

    Parameters
    ----------
    loaded : LoadedModel
    store : KVStore
    prefix : PrefixKV
    encode : callable
        Text to stand-alone token ids.
    owner : ModelOwner
        Computes the forwards.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        store: KVStore,
        prefix: PrefixKV,
        encode: Callable[[str], list[int]],
        owner: ModelOwner,
    ) -> None:
        self._loaded, self._store, self._prefix, self._owner = loaded, store, prefix, owner
        self._encode = encode
        self._sidecars = store.sidecars
        self._pool = CachePool(loaded.dtype, loaded.device)

    def run(self, keys: Iterable[str], view: View, *, progress: bool = True) -> int:
        """Rank and store the anchors of these chunks, and return how many were new; resumes where it was stopped.

        Parameters
        ----------
        keys : iterable of str
            Stored chunks; others are left out.
        view : View
            With the anchors, and the layers that score.
        progress : bool
            Whether to show a progress bar.
        """
        rows = self._store.rows(key for key in dict.fromkeys(keys) if self._lacking(key, view))
        counts, written = PassCounts(len(rows), sum(len(row.token_ids) for row in rows.values())), 0
        with progress_bar("Storing anchors", counts, enabled=progress) as show:
            for key, row in rows.items():
                nbytes = self._write(key, row.token_ids, view)
                written += nbytes > 0
                counts.add(len(row.token_ids), nbytes)
                show()
        return written

    def scores(self, stored: StoredKV, token_ids: Sequence[int], anchors: Anchors) -> Tensor:
        """Return float32 ``[tokens]``: the rule's ranking of a chunk's tokens."""
        if anchors.rule == "sink":
            return sink_scores(stored.num_tokens)
        if anchors.rule in ("knorm", "knorm_high"):
            lowest_first = knorm_scores(stored.read_layers(0, stored.num_layers)[0])
            return lowest_first if anchors.rule == "knorm" else -lowest_first
        ids = [*self._encode(_REPEAT), *token_ids]

        def compute() -> Tensor:
            with torch.inference_mode():
                self._loaded.check_unchanged()
                return kvzip_scores(self._loaded, self._prefix, stored, ids, self._pool)

        return self._owner.run(compute)

    def _lacking(self, key: str, view: View) -> list[str]:
        """Return the names of the sidecars that a chunk lacks; that with a context shift only where it has one."""
        names = list(sidecar_names(view))
        if view.anchor_shift is not None and not self._sidecars.has(key, view.anchor_shift):
            names = names[1:]
        return [name for name in names if not self._sidecars.has(key, name)]

    def _write(self, key: str, token_ids: Sequence[int], view: View) -> int:
        """Write the sidecars that a chunk lacks, and return their bytes; nothing of a chunk that is there no more."""
        stored = self._store.open(key, token_ids, counted=False)
        if stored is None:
            return 0
        with stored:
            sides = self._derived(stored, token_ids, view)
        try:
            for name in self._sidecars.names(key):
                if name.startswith(_OLD):
                    self._sidecars.remove(key, name)
            return sum(self._sidecars.put(key, name, side) for name, side in sides.items())
        except ConfigError:
            if self._store.contains([key]):
                raise
            return 0

    def _derived(self, stored: StoredKV, token_ids: Sequence[int], view: View) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of the sidecars that a chunk lacks."""
        anchors, sides = view.anchors, dict[str, dict[str, Tensor]]()
        if anchors is None:
            return sides
        own = sidecar_names(view)[-1]
        plain = stored.read_layers(0, max(view.layers) + 1)
        room = plain[0].shape[1], plain[0].shape[3], plain[1].shape[3]
        layout = AnchorLayout(view.layers, stored.dtype, stored.num_tokens, room)
        if anchors.ratio == 1.0:
            positions = torch.arange(stored.num_tokens)
        elif known := self._sidecars.read(stored.key, own, layout.fits):
            positions = known["positions"].long()
        else:
            positions = anchor_positions(self.scores(stored, token_ids, anchors), anchors.ratio)
        for name in self._lacking(stored.key, view):
            kv = plain if name == own else self._shifted(stored, view.anchor_shift or "", plain)
            if kv is not None:
                sides[name] = AnchorKV.chosen(positions, *kv, view.layers).tensors(view.layers, anchors.storage)
        return sides

    def _shifted(self, stored: StoredKV, name: str, plain: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return keys and values of a chunk's first layers with most of its context shift; None if that does not fit.

        Who adds the shift to a request's KV reports one that does not.
        """
        shift, shifted = self._sidecars.read(stored.key, name) or {}, list[Tensor]()
        for of, part in zip(("keys", "values"), plain, strict=True):
            change, scale = shift.get(of), shift.get(f"{of}_scale")
            if change is None or scale is None or change.shape != (stored.num_layers, *part.shape[1:]):
                return None
            layers = slice(part.shape[0])
            shifted.append((part.float() + USUAL_WEIGHT * scale[layers] * change[layers]).to(part.dtype))
        return shifted[0], shifted[1]
