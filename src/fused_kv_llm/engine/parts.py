"""One model over one store: what ingestion and answering share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.chunk import KVIdentity
from fused_kv_llm.config import EngineConfig
from fused_kv_llm.context_shift import shift_name
from fused_kv_llm.model import LoadedModel, ModelLock, PrefixKV, compute_prefix, load_model, lock_of
from fused_kv_llm.prompt import PromptRenderer
from fused_kv_llm.store import KVStore, replacement_name
from fused_kv_llm.thread_pool import release_openmp_workers

from .reference import check_reference

__all__ = ["EngineParts", "open_parts"]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The model, the store and the lock: what everything else in an engine works with.

    Parameters
    ----------
    loaded : LoadedModel
    store : KVStore
    renderer : PromptRenderer
    identity : str
        Digest of everything besides its token ids on which a chunk's KV depends.
    namespace : KVIdentity
        What `identity` is made of.
    prefix : PrefixKV
        Exact KV of the ids that the chat template puts before every prompt.
    catalog : ChunkCatalog
        Finds the chunks of this identity by their text.
    model_lock : ModelLock
        Held during every forward; that of the model, whichever engine uses it.
    shift_name : str or None
        Name of the sidecars with the context shifts that are used; None uses none.
    replacement : str or None
        Name of the sidecars with the KV that replaces chunks' own, see :func:`.open_replacement`; None uses none.
    """

    loaded: LoadedModel
    store: KVStore
    renderer: PromptRenderer
    identity: str
    namespace: KVIdentity
    prefix: PrefixKV
    catalog: ChunkCatalog
    model_lock: ModelLock
    shift_name: str | None
    replacement: str | None = None

    @property
    def preprocessed(self) -> str | None:
        """Name of the sidecars that preprocessing makes; None if chunks are used as they are."""
        return self.shift_name or self.replacement

    @property
    def dtype(self) -> str:
        """Compute dtype, for example ``"bfloat16"``."""
        return _name(self.loaded)

    @property
    def kv_dtype(self) -> str:
        """Dtype in which keys and values are stored; ``"auto"`` is :attr:`dtype`."""
        return _stored_as(self.store, self.loaded)

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.loaded.geometry.context_length


def open_parts(
    config: EngineConfig, *, remote_options: dict[str, Any] | None = None, learn: bool = True
) -> EngineParts:
    """Open the store, then load the model.

    A store that cannot be used is known at once, while loading a model takes long.

    Parameters
    ----------
    config : EngineConfig
    remote_options : dict or None
        Further arguments of the remote tier's backend.
    learn : bool
        Whether to learn at once what other machines have put on the remote tier.

    Raises
    ------
    ConfigError, ModelNotFoundError, UnsupportedModelError, ModelChangedError, StoreUnavailableError
        See ``FusedKVEngine``.
    """
    store = KVStore(
        config.kv_dir,
        memory_bytes=config.memory_bytes,
        disk_bytes=config.disk_bytes,
        policy=config.policy,
        kv_dtype=config.kv_dtype,
        remote=config.remote,
        remote_options=remote_options,
        learn=learn,
        refresh_s=config.refresh_s,
    )
    try:
        loaded = _load(config)
        renderer = PromptRenderer(loaded.tokenizer, wrap_chat_template=config.wrap_chat_template)
        namespace = _identify(config, loaded, renderer, store)
        identity = namespace.digest
        check_reference(loaded, store, identity, lock_of(loaded.model))
        prefix = compute_prefix(loaded, tuple(renderer.header_ids))
        catalog, prompts = ChunkCatalog(store, identity), config.preprocessing_prompts
        shifts = shift_name(config.neighbours, prompts) if config.preprocessing == "similar" else None
        replacement = replacement_name(config.neighbours) if config.preprocessing == "fusionrag" else None
        release_openmp_workers()
        return EngineParts(
            loaded, store, renderer, identity, namespace, prefix, catalog, lock_of(loaded.model), shifts, replacement
        )  # fmt: skip
    except BaseException:
        store.close()
        raise


def _load(config: EngineConfig) -> LoadedModel:
    model: Any = config.model
    if isinstance(model, LoadedModel):
        model.check_unchanged()
        return model
    return load_model(
        model, tokenizer=config.tokenizer, dtype=config.dtype, device=config.device, trust_probe=config.trust_probe
    )


def _identify(config: EngineConfig, loaded: LoadedModel, renderer: PromptRenderer, store: KVStore) -> KVIdentity:
    """Return the identity of what is stored for this configuration; the store learns a name for it."""
    kv_dtype = _stored_as(store, loaded)
    ids = ",".join(map(str, renderer.header_ids))
    identity = KVIdentity(
        model=loaded.fingerprint,
        tokenizer=loaded.tokenizer_fingerprint,
        dtype=_name(loaded),
        rope=loaded.geometry.rope_digest,
        prefix=hashlib.sha256(ids.encode()).hexdigest(),
        kv_dtype=kv_dtype,
        tenant=config.tenant,
    )
    stored = [] if kv_dtype == "auto" else [f"stored in {kv_dtype}"]
    store.namespaces.add(identity)
    store.describe(identity.digest, ", ".join([loaded.model_id, _name(loaded), *stored]))
    return identity


def _name(loaded: LoadedModel) -> str:
    return str(loaded.dtype).removeprefix("torch.")


def _stored_as(store: KVStore, loaded: LoadedModel) -> str:
    return "auto" if store.kv_dtype == _name(loaded) else store.kv_dtype
