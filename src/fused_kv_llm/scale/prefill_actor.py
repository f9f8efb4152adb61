"""An ingestion actor: holds the model, computes batches that the driver has planned, and writes to the shared store.

What it computes with is what an engine ingests with. Its node has a local tier of the shared store, a folder that all
actors of the node use; the driver is told what is stored, so nobody has to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fused_kv_llm.chunk import KVIdentity
from fused_kv_llm.config import EngineConfig
from fused_kv_llm.engine import EngineParts, open_parts, similarity_of
from fused_kv_llm.errors import PromptError, StoreUnavailableError
from fused_kv_llm.offline import (
    BATCH_TOKENS,
    BETWEEN_CHUNKS,
    CorpusPlanner,
    FixedPieces,
    Ingestor,
    PendingChunk,
    PrefillCost,
    PreprocessingPlan,
    Preprocessor,
)
from fused_kv_llm.serving import loop_of

__all__ = ["CorpusFacts", "PrefillActor", "Preprocessed", "StoredChunk"]


@dataclass(frozen=True, slots=True)
class CorpusFacts:
    """What the driver has to know of the model, which it does not load.

    Parameters
    ----------
    identity : KVIdentity
    about : str
        What people call it.
    max_tokens : int
        Tokens that fit behind the header.
    header_tokens, separator_tokens : int
        Tokens before every chunk, and between two of a prompt.
    kv_bytes_per_token : int
    dtype, kv_dtype : str
        What it computes in, and what is stored.
    """

    identity: KVIdentity
    about: str
    max_tokens: int
    header_tokens: int
    separator_tokens: int
    kv_bytes_per_token: int
    dtype: str
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk that is in the shared store: its key, the bytes of its file, and whether it was computed just now."""

    key: str
    nbytes: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class Preprocessed:
    """What a batch of the second pass has stored.

    Parameters
    ----------
    sidecars : dict of str to dict of str to int
        By the chunks' keys, names and bytes of their sidecars.
    written : dict of str to int
        By the keys, the bytes of the sidecars that are new.
    neighbour_tokens : int
        Tokens of similar chunks that had to be prefilled.
    """

    sidecars: dict[str, dict[str, int]]
    written: dict[str, int]
    neighbour_tokens: int


class PrefillActor:
    """Computes and stores batches of chunks; one call at a time.

    Parameters
    ----------
    options : dict
        Of ``EngineConfig``.
    store_options : dict
        Further arguments of the shared store's backend.
    """

    def __init__(self, options: dict[str, Any], store_options: dict[str, Any]) -> None:
        self._options, self._store_options = options, store_options

    def start(self) -> CorpusFacts:
        """Load the model, and return what the driver has to know of it.

        Raises
        ------
        ConfigError, ModelError, StoreError
            As an engine does.
        """
        config = EngineConfig(**self._options)
        parts = open_parts(config, remote_options=self._store_options, learn=False)
        loaded, store = parts.loaded, parts.store
        room = parts.context_length - len(parts.prefix.token_ids)
        owner = FixedPieces(loop_of(loaded.model), config.batch_tokens or BATCH_TOKENS)
        planner = CorpusPlanner(parts.catalog, parts.identity, parts.renderer.encode_chunk, room)
        similarity = similarity_of(config)
        self._parts, self._store, self._planner = parts, store, planner
        self._ingestor = Ingestor(loaded, store, parts.identity, parts.prefix, planner, owner, None,
                                  PrefillCost(loaded, store.kv_dir))  # fmt: skip
        # The neighbours are the driver's: nothing is remembered about them here.
        self._preprocessor = None if similarity is None else Preprocessor(
            loaded, store, parts.prefix, planner, replace(similarity, folder=None), owner
        )  # fmt: skip
        return self._facts(parts, room)

    def describe(self, texts: Sequence[str]) -> list[tuple[int, ...] | str]:
        """Return the stand-alone token ids of texts, or why a text cannot have any."""
        found = list[tuple[int, ...] | str]()
        for text in texts:
            try:
                found.append(tuple(self._parts.renderer.encode_chunk(text)))
            except PromptError as error:
                found.append(str(error))
        return found

    def prefill(self, chunks: Sequence[PendingChunk]) -> list[StoredChunk]:
        """Compute chunks in one forward, unless all are in the shared store, and store there those that are not.

        Raises
        ------
        StoreError
            If the shared store or the disk cannot be used, or does not keep what is stored there; what was stored
            stays, and it can be called again.
        """
        keys = [chunk.key for chunk in chunks]
        # Only a batch that is computed again, since its actor died or another ingestion runs, finds some.
        there = self._store.shared.present(keys)
        if there:
            # What is damaged there is deleted and not brought: it is computed again as if it had not been there.
            there &= self._store.shared.bring(sorted(there))
        new = [chunk for chunk in chunks if chunk.key not in there]
        if new:
            # All of them: with others missing, the last bits of the rest would be other ones.
            self._ingestor.prefill_together(chunks)
        # All: one that was on the disk already may not have been copied before its actor died.
        self._store.shared.publish(keys)
        rows = self._store.rows(keys)
        if lost := [key for key in keys if key not in rows]:
            raise StoreUnavailableError(
                f"{len(lost)} of {len(keys)} chunks, {lost[0][:16]} among them, were stored in "
                f"{self._store.kv_dir} and are not there any more. Raise disk_bytes, or end what deletes there."
            )
        return [StoredChunk(key, rows[key].nbytes, key not in there) for key in keys]

    def preprocess(self, plan: PreprocessingPlan) -> Preprocessed:
        """Preprocess chunks together and store what that makes.

        Parameters
        ----------
        plan : PreprocessingPlan
            One batch.

        Raises
        ------
        StoreError
            If the shared store or the disk cannot be used; it can be called again.
        """
        self._bring(plan)
        written: dict[str, int] = {}
        tokens = self._second_pass.run(plan, lambda chunk, n: written.__setitem__(chunk.key, n), lambda: False)
        self._store.shared.publish(written)
        sidecars = {key: self._store.sidecars.sizes_of(key) for key in written}
        return Preprocessed(sidecars, written, tokens)

    def close(self) -> None:
        """Close the store's local tier."""
        self._store.close()

    @property
    def _second_pass(self) -> Preprocessor:
        if self._preprocessor is None:
            raise ValueError('preprocessing="none" has no second pass')
        return self._preprocessor

    def _bring(self, plan: PreprocessingPlan) -> None:
        """Have the plain KV that a batch needs on the disk: of its chunks, or of those that stand before them."""
        replaces = self._second_pass.replaces
        wanted = dict.fromkeys(key for one in plan.chunks for key in (one.key, *(one.neighbours if replaces else ())))
        self._store.shared.bring(list(wanted))

    def _facts(self, parts: EngineParts, room: int) -> CorpusFacts:
        loaded = parts.loaded
        return CorpusFacts(
            parts.namespace,
            parts.store.namespaces.names().get(parts.identity, loaded.model_id),
            room,
            len(parts.prefix.token_ids),
            len(self._planner.chunk(BETWEEN_CHUNKS).token_ids),
            loaded.geometry.kv_bytes_per_token(loaded.dtype),
            parts.dtype,
            parts.kv_dtype,
        )
