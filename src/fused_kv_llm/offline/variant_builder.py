"""Making variants: a prompt is prefilled in full beside requests, and its chunks are kept as they are in it.

Cache-Craft (section 3.4.3) saves chunk-caches and their attention while a live prompt is prefilled. Recording the
attention of all layers takes as long as attending does, and KV of a request that reuses other KV is not exact. So a
request leaves only its token ids and the places of its chunks, and the prompt is computed once more when there is time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model import (
    AttentionRule,
    CachePool,
    ForwardPass,
    FusedCache,
    LoadedModel,
    ModelOwner,
    StopForwardError,
    attention_weights,
    check_numbers,
    forward_kv,
)
from fused_kv_llm.prompt import Segment
from fused_kv_llm.store import KVStore, VariantRecord, Variants, variant_name

from .first_passes import AfterFirstPasses, first_passes_of

__all__ = ["PromptChunks", "VariantBuilder"]

_PIECE_TOKENS = 256
_BLOCK_ROWS = 128


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """A prompt and the places of its chunks.

    Parameters
    ----------
    ids : tuple of int
        The prompt's tokens.
    segments : tuple of Segment
        Its chunks, ascending, all with a key.
    """

    ids: tuple[int, ...]
    segments: tuple[Segment, ...]

    def before(self, number: int) -> tuple[str, ...]:
        """Return the keys of the chunks before one of them, in order, each once."""
        return tuple(dict.fromkeys(one.key for one in self.segments[:number] if one.key is not None))


class VariantBuilder:
    """Computes and writes the variants of a prompt's chunks; one thread at a time.

    Parameters
    ----------
    loaded : LoadedModel
    store : KVStore
    variants : Variants
    owner : ModelOwner
        Computes the pieces, between those of requests and when no first pass is under way.
    """

    def __init__(self, loaded: LoadedModel, store: KVStore, variants: Variants, owner: ModelOwner) -> None:
        self._loaded, self._store, self._variants, self._owner = loaded, store, variants, owner
        # Nothing is kept between prompts: requests need the memory more.
        self._pool = CachePool(loaded.dtype, loaded.device, max_bytes=0)

    def lacking(self, prompt: PromptChunks) -> list[int]:
        """Return the numbers of the chunks that have no variant behind just those that stand before them.

        A chunk behind no other is stored as its plain KV already.
        """
        keys = [one.key for one in prompt.segments]
        stored = self._store.contains(key for key in keys if key is not None)
        return [
            number
            for number, key in enumerate(keys)
            if key in stored
            and key not in (before := prompt.before(number))
            and before
            and not self._variants.has(key, variant_name(before))
        ]

    def run(self, prompt: PromptChunks, stopped: Callable[[], bool]) -> int:
        """Write the variants of a prompt's chunks that are not there yet; returns their bytes.

        Parameters
        ----------
        prompt : PromptChunks
        stopped : callable
            Asked before every piece.

        Raises
        ------
        StoreError
            What a write met.
        StoppedError
            If it was stopped; nothing of this prompt is written then.
        """
        lacking = self.lacking(prompt)
        if not lacking:
            return 0
        count = prompt.segments[lacking[-1]].stop
        owner = AfterFirstPasses(self._owner, first_passes_of(self._loaded.model), stopped)
        cache = FusedCache(self._loaded.geometry, count, self._pool)
        try:
            recording = _Recording(prompt.segments, count, self._loaded)
            start = 0
            while start < count:
                stop = min(count, start + owner.piece_tokens(_PIECE_TOKENS))
                piece = _Piece(self._loaded, prompt.ids, cache, recording, range(start, stop))
                owner.run(piece.compute, stop - start, stopped)
                start = stop
            return sum(self._write(prompt, number, cache, recording) for number in lacking)
        finally:
            cache.release()

    def _write(self, prompt: PromptChunks, number: int, cache: FusedCache, recording: _Recording) -> int:
        segment = prompt.segments[number]
        rows = self._store.rows([segment.key]) if segment.key is not None else {}
        if segment.key not in rows:
            # It was deleted meanwhile.
            return 0
        num_tokens = len(rows[segment.key].token_ids)
        record = recording.record(prompt, number, num_tokens)
        parts = []
        for whole in (cache.keys[:, 0], cache.values[:, 0]):
            part = torch.zeros(*whole.shape[:2], num_tokens, whole.shape[3], dtype=whole.dtype)
            part[:, :, slice(*record.covered)] = whole[:, :, segment.start : segment.stop].cpu()
            parts.append(part)
        check_numbers([(parts[0], parts[1])], self._loaded.model_id, self._loaded.dtype)
        dtype = str(self._loaded.dtype).removeprefix("torch.")
        storage = dtype if self._store.kv_dtype == "auto" else self._store.kv_dtype
        try:
            return self._variants.put(segment.key, record, parts[0], parts[1], storage)
        except ConfigError:
            if self._store.contains([segment.key]):
                raise
            return 0


class _Piece:
    """Some rows of a prompt that is prefilled."""

    def __init__(
        self, loaded: LoadedModel, ids: Sequence[int], cache: FusedCache, recording: _Recording, rows: range
    ) -> None:
        self._loaded, self._ids, self._cache, self._recording, self._rows = loaded, ids, cache, recording, rows

    def compute(self) -> None:
        """Compute them; those before them are in the cache."""
        loaded, rows = self._loaded, self._rows
        loaded.check_unchanged()
        positions = torch.arange(rows.start, rows.stop, device=loaded.device)
        ids = torch.tensor([self._ids[rows.start : rows.stop]], device=loaded.device)
        with torch.inference_mode():
            forward_kv(loaded, ids, positions, self._cache, _RecordingPass(positions, rows.stop, self._recording))


class _RecordingPass(ForwardPass):
    """A full prefill's rows, whose attention is recorded in every layer that caches KV."""

    def __init__(self, rows: Tensor, visible: int, recording: _Recording) -> None:
        super().__init__(rows, visible)
        self._recording = recording

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output, or end the forward behind the last layer that caches KV."""
        plan, recording = self.plans(rule.mask)[0], self._recording
        for begin in range(0, plan.num_rows, _BLOCK_ROWS):
            span = slice(begin, min(begin + _BLOCK_ROWS, plan.num_rows))
            weights = attention_weights(q[0, :, span], k[0], plan, rule, span).mean(0)
            recording.add(layer_idx, self.rows[span], weights)
        if layer_idx == recording.num_layers - 1:
            raise StopForwardError
        return super().attend(layer_idx, q, k, v, rule)


class _Recording:
    """How much the tokens of a prompt look at its chunks, layer by layer."""

    def __init__(self, segments: Sequence[Segment], num_tokens: int, loaded: LoadedModel) -> None:
        self.num_layers = loaded.geometry.num_layers
        self._member = torch.zeros(num_tokens, len(segments), device=loaded.device)
        for number, segment in enumerate(segments):
            self._member[segment.start : min(segment.stop, num_tokens), number] = 1.0
        self._given = torch.zeros(self.num_layers, num_tokens, len(segments), device=loaded.device)

    def add(self, layer_idx: int, rows: Tensor, weights: Tensor) -> None:
        """Add weights ``[R, N]`` of rows at these positions, averaged over heads."""
        # Equation 4 counts a token's attention to earlier tokens, without that to itself.
        own = weights.gather(1, rows[:, None])
        self._given[layer_idx, rows] = weights @ self._member[: weights.shape[1]] - own * self._member[rows]

    def record(self, prompt: PromptChunks, number: int, num_tokens: int) -> VariantRecord:
        """Return what is recorded of a chunk of `num_tokens` tokens, some of which stand in the prompt."""
        segment, prefix = prompt.segments[number], prompt.before(number)
        given = self._given[:, segment.start : segment.stop].cpu()
        inter, tokens = torch.zeros(self.num_layers, len(prefix)), torch.zeros(len(prefix), dtype=torch.int64)
        for column, other in enumerate(prompt.segments[:number]):
            place = prefix.index(str(other.key))
            inter[:, place] += given[:, :, column].sum(1)
            tokens[place] += other.num_tokens
        covered = segment.chunk_start, segment.chunk_start + segment.num_tokens
        token_inter = torch.zeros(num_tokens)
        token_inter[slice(*covered)] = given[:, :, :number].sum(2).mean(0)
        position = segment.start - segment.chunk_start
        return VariantRecord(prefix, tokens, inter, given[:, :, number].sum(1), token_inter, position, covered)
