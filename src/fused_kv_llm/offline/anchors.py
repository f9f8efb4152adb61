"""Anchors: the few tokens of a chunk that stand for it when a question is probed (QCFuse section 3.3).

For every stored chunk the rule ranks its tokens, and a sidecar keeps what the probe will need: the keys and values
of the anchors in the layers below the last one that scores, and the keys of all tokens in the layers that score. The
probe then never reads the chunk's KV itself. Anchors that are to be shifted are stored twice: as the chunk's own KV has
them, and with most of the chunk's context shift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fused_kv_llm.context_shift import USUAL_WEIGHT
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
from fused_kv_llm.store import AnchorKV, KVStore, StoredKV

from .progress import PassCounts, progress_bar

__all__ = ["AnchorBuilder", "kvzip_scores"]

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

    def run(self, keys: Iterable[str], view: View, *, refreshed: bool = False, progress: bool = True) -> int:
        """Rank and store the anchors of these chunks, and return how many were new; resumes where it was stopped.

        Parameters
        ----------
        keys : iterable of str
            Stored chunks; others are left out.
        view : View
            With the anchors, and the layers that score.
        refreshed : bool
            Whether their context shifts are new, so that anchors with these are stored anew.
        progress : bool
            Whether to show a progress bar.
        """
        if view.anchors is None:
            return 0
        lacking = {key: found for key in dict.fromkeys(keys) if (found := self._lacking(key, view, refreshed))}
        rows = self._store.rows(lacking)
        counts = PassCounts(len(rows), sum(len(row.token_ids) for row in rows.values()))
        with progress_bar("Storing anchors", counts, enabled=progress) as show:
            for key, row in rows.items():
                stored = self._store.open(key, row.token_ids, counted=False)
                if stored is None:
                    continue
                with stored:
                    nbytes = self._write(stored, row.token_ids, view.anchors, view.layers, lacking[key])
                counts.add(len(row.token_ids), nbytes)
                show()
        return len(rows)

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

    def _lacking(self, key: str, view: View, refreshed: bool) -> dict[str, str | None]:
        """Return the sidecars that a chunk lacks, and the name of the context shift that each is to have."""
        names, shift = sidecar_names(view), view.anchor_shift
        lacking: dict[str, str | None] = {} if self._sidecars.has(key, names[-1]) else {names[-1]: None}
        has_shift = shift is not None and self._sidecars.has(key, shift)
        if has_shift and (refreshed or not self._sidecars.has(key, names[0])):
            lacking[names[0]] = shift
        return lacking

    def _write(
        self, stored: StoredKV, token_ids: Sequence[int], anchors: Anchors, layers: Sequence[int],
        wanted: Mapping[str, str | None],
    ) -> int:  # fmt: skip
        """Write the sidecars that are wanted, and return their bytes."""
        if anchors.ratio == 1.0:
            positions = torch.arange(stored.num_tokens)
        else:
            positions = anchor_positions(self.scores(stored, token_ids, anchors), anchors.ratio)
        plain, nbytes = stored.read_layers(0, max(layers) + 1), 0
        for name, shift in wanted.items():
            keys, values = plain if shift is None else self._shifted(stored.key, shift, plain)
            kept = AnchorKV.chosen(positions, keys, values, layers)
            nbytes += self._sidecars.put(stored.key, name, kept.tensors(layers, anchors.storage))
        return nbytes

    def _shifted(self, key: str, name: str, plain: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a chunk's first layers with most of its context shift."""
        shift = self._sidecars.read(key, name)
        if shift is None:
            return plain
        keys, values = (
            (part.float() + USUAL_WEIGHT * shift[f"{of}_scale"][: len(part)] * shift[of][: len(part)]).to(part.dtype)
            for of, part in zip(("keys", "values"), plain, strict=True)
        )
        return keys, values
