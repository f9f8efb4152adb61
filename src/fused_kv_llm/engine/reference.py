"""Whether a model still computes what its stored KV was computed with."""

from __future__ import annotations

from fused_kv_llm.errors import ModelChangedError
from fused_kv_llm.model import LoadedModel, ModelLock, compare_reference, compute_reference, measure_noise
from fused_kv_llm.store import KVStore

__all__ = ["check_reference"]


def check_reference(loaded: LoadedModel, store: KVStore, identity: str, lock: ModelLock) -> None:
    """Compare what a model computes for a fixed text with what it computed when its first chunks were stored.

    The first engine of an identity stores it. Where no chunk is stored, there is nothing that could be wrong, and it
    is stored anew.

    Parameters
    ----------
    loaded : LoadedModel
    store : KVStore
    identity : str
        ``KVIdentity.digest``.
    lock : ModelLock
        Held during forwards.

    Raises
    ------
    ModelChangedError
        If it is another result than rounding explains.
    """
    with lock:
        now = compute_reference(loaded)
    stored = store.references.read(identity)
    if stored is not None and compare_reference(stored, now, loaded.dtype) is not None and _is_empty(store, identity):
        store.references.remove(identity)
        stored = None
    if stored is None:
        with lock:
            store.references.add(identity, measure_noise(loaded, now))
        # Another process may have been first. In a read-only store there is none now either.
        stored = store.references.read(identity)
    found = None if stored is None else compare_reference(stored, now, loaded.dtype)
    if found is not None:
        raise ModelChangedError(
            f"The model {loaded.model_id!r} does not compute what the KV in {store.kv_dir} was computed with, although "
            f"its weights, configuration, adapters and hooks are the same: for a fixed text, keys or values of layer "
            f"{found.layer} differ by {found.deviation:.1%} of their size, and rounding explains "
            f"{found.tolerated:.1%}. A function that it calls was patched, a hook depends on something else, or a "
            "library computes otherwise in this release. Undo that, or ingest again under another kv_dir or tenant."
        )


def _is_empty(store: KVStore, identity: str) -> bool:
    return next(iter(store.content_hashes(identity)), None) is None
