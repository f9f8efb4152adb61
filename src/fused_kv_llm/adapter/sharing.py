"""One engine per model and store in a process, however many framework objects ask for it.

A chat model, a text model and a LlamaIndex LLM of the same options share one engine; objects that differ in the
store, the tenant or the memory budget still share the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.model import choose_device, choose_dtype

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
    """The right to use an engine; with the last one given back the engine is closed.

    Parameters
    ----------
    engine : FusedKVEngine
    key : tuple or None
        Its place among the shared engines; None for an engine that someone else made and that is closed with
        the lease.
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
        """Give the engine back; a second time does nothing."""
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


_PLAIN_SETTINGS = (
    "tenant", "wrap", "store_misses", "preprocessing", "num_neighbours",
    "memory_bytes", "disk_bytes", "policy", "kv_dtype", "remote",
)  # fmt: skip


def lease_engine(settings: Mapping[str, Any]) -> EngineLease:
    """Return a lease of the engine with these settings, made now if there is none.

    Parameters
    ----------
    settings : mapping
        Keyword arguments of :class:`FusedKVEngine`, without recompute_ratio and selector, which callers give with
        every request.

    Returns
    -------
    EngineLease

    Raises
    ------
    ConfigError, ModelNotFoundError, UnsupportedModelError, StoreUnavailableError
        From the engine.
    """
    device = choose_device(settings["device"])
    dtype = choose_dtype(settings["dtype"], device)[0]
    weights = (_name(settings["model"]), _name(settings["tokenizer"]), str(device), str(dtype))
    folder = str(Path(settings["kv_dir"]).expanduser().resolve())
    rest = tuple(settings[name] for name in _PLAIN_SETTINGS)
    key = (*weights, folder, *rest, _ByIdentity(settings["embedder"]))
    with _lock:
        entry = _entries.get(key)
        if entry is None or entry.engine.closed:
            loaded = next((e.engine.loaded for k, e in list(_entries.items()) if k[: len(weights)] == weights), None)
            options = dict(settings) if loaded is None else {**settings, "model": loaded, "tokenizer": None}
            entry = _entries[key] = _Entry(FusedKVEngine(**options))
        entry.users += 1
        return EngineLease(entry.engine, key)


def _name(value: Any) -> Any:
    """A string for what is loaded by name; the object itself, by identity, for what is in memory."""
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
