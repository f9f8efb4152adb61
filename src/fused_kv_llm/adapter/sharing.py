"""One engine per model and store in a process, however many framework objects ask for it.

A chat model, a text model and a LlamaIndex LLM of the same options share one engine; objects that differ in the
store, the tenant or the memory budget still share the weights.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_kv_llm.config import EngineConfig
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.model import choose_device, choose_dtype
from fused_kv_llm.selectors import resolve_selector

__all__ = ["EngineLease", "lease_engine"]

_Key = tuple[Any, ...]


@dataclass(slots=True)
class _Entry:
    engine: FusedKVEngine
    users: int = 0


_entries: dict[_Key, _Entry] = {}
# Re-entrant: a lease may be given back by the collector while this thread holds the lock.
_lock = threading.RLock()


class EngineLease:
    """The right to use an engine; the engine is closed when its last lease ends.

    Parameters
    ----------
    engine : FusedKVEngine
    key : tuple or None
        The key of a shared engine; None for an engine that the caller made, which is closed when the lease ends.
    """

    def __init__(self, engine: FusedKVEngine, key: _Key | None = None) -> None:
        self.engine = engine
        self._key = key
        self._released = False

    @property
    def shared(self) -> bool:
        """Whether the engine came from :func:`lease_engine`."""
        return self._key is not None

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        with _lock:
            if self._released:
                return
            self._released = True
            entry = _entries.get(self._key) if self._key is not None else None
            if entry is not None and entry.engine is self.engine:
                entry.users -= 1
                if entry.users:
                    return
                del _entries[self._key or ()]
        self.engine.close()


# Not part of an engine's key: callers name these in every request.
_PER_REQUEST = {"recompute_ratio", "selector"}


def lease_engine(config: EngineConfig) -> EngineLease:
    """Return a lease of the engine with these options, made now if there is none.

    Parameters
    ----------
    config : EngineConfig
        Its ratio and selector do not matter: every request names its own.

    Raises
    ------
    ConfigError, ModelNotFoundError, UnsupportedModelError, StoreUnavailableError
        From the engine.
    """
    resolve_selector(config.selector)
    weights, key = _keys(config)
    with _lock:
        entry = _entries.get(key)
        if entry is None or entry.engine.closed or entry.engine.loaded.snapshot.changes():
            # A model in memory may have got another adapter since an engine took it: then it is another model.
            others = (e.engine.loaded for k, e in list(_entries.items()) if k[: len(weights)] == weights)
            loaded = next((other for other in others if not other.snapshot.changes()), None)
            known = {name: value for name, value in config if name not in _PER_REQUEST}
            options = known if loaded is None else {**known, "model": loaded, "tokenizer": None}
            entry = _entries[key] = _Entry(FusedKVEngine(**options))
        entry.users += 1
        return EngineLease(entry.engine, key)


def _keys(config: EngineConfig) -> tuple[_Key, _Key]:
    """Return the keys of an engine's weights and of the engine; the second begins with the first."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)[0]
    weights = (_name(config.model), _name(config.tokenizer), str(device), str(dtype), config.trust_probe)
    others = dict(config)
    for name in ("model", "tokenizer", "device", "dtype", *_PER_REQUEST):
        del others[name]
    folder = str(Path(others.pop("kv_dir")).expanduser().resolve())
    return weights, (*weights, folder, _ByIdentity(others.pop("embedder")), *others.items())


def _name(value: Any) -> Any:
    """Return a string for what is loaded by name; what is in memory is compared by identity."""
    if value is None or not isinstance(value, (str, Path)):
        return _ByIdentity(value)
    folder = Path(value).expanduser()
    return str(folder.resolve()) if folder.exists() else str(value)


@dataclass(frozen=True, slots=True, eq=False)
class _ByIdentity:
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
