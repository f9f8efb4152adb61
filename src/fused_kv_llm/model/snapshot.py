"""Whether a model is as it was when an engine took it: a snapshot that is compared before every request.

Its KV is stored under an identity that was taken once. A model belongs to its user, who may switch an adapter, hook or
patch a part of it, or train on. Everything that can be seen without reading the weights is compared: which modules,
parameters, hooks and functions there are, their plain attributes, what the configuration says, and where and in which
version weights and buffers are. What writes through ``tensor.data`` leaves no trace there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, call, eq, is_
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor

from fused_kv_llm.model.fingerprint import IRRELEVANT_SETTINGS
from fused_kv_llm.model.own_code import functions_of, is_library_class, members
from fused_kv_llm.model.structure import foreign_hooks, global_hooks

__all__ = ["ModelSnapshot"]

_PLAIN = (bool, int, float, str, type(None))
# Set by forwards, or without a meaning for them.
_PASSING = frozenset(
    ("_is_hf_initialized", "gradient_checkpointing", "in_features", "max_seq_len_cached", "name_or_path",
     "out_features")
)  # fmt: skip
_CHANGING = ("dynamic", "longrope")
_MOST = 3
_code = attrgetter("__code__")


class _Entry(NamedTuple):
    """What a table had under a key, and how to call it in a message."""

    table: Mapping[str, Any]
    key: str
    value: Any
    label: str


class ModelSnapshot:
    """What of a model decides its numbers, at one time, as far as it can be seen quickly.

    Parameters
    ----------
    model : torch.nn.Module
        After a first forward: some kinds of quantised layers are finished by it.
    """

    def __init__(self, model: Any) -> None:
        modules = dict(model.named_modules())
        self._modules, self._kinds = list(modules.values()), [type(module) for module in modules.values()]
        self._same = _Table([*_parts(modules), *_functions(self._kinds)])
        self._equal = _Table([*_attributes(modules), *_settings(modules)])
        tables = [(name, table) for name, part in modules.items() for table in (part._modules, part._parameters)]
        self._counted, self._counts = tables, [len(table) for _, table in tables]
        self._hooked = [(name, table) for name, part in modules.items()
                        for table in (part._forward_pre_hooks, part._forward_hooks)]  # fmt: skip
        self._hook_ids, self._hooks = self._ids(), self._foreign()
        self._own_functions = [entry.value for entry in self._same.entries if isinstance(entry.value, FunctionType)]
        self._codes = list(map(_code, self._own_functions))
        self._global = global_hooks()
        named = [*model.named_parameters(), *_buffers(modules)]
        self._versioned = [one for one in named if not one[1].is_inference()]
        self._versions = [tensor._version for _, tensor in self._versioned]
        self._placed = [one for one in named if _address(one[1])]
        self._addresses = [tensor.data_ptr() for _, tensor in self._placed]

    def changes(self) -> list[str]:
        """Return what is not as it was, in words; an empty list if nothing is known to have changed."""
        if self._holds():
            return []
        return _shortened(list(dict.fromkeys(self._found())))

    def _holds(self) -> bool:
        if self._hook_ids != self._ids():
            if self._foreign() != self._hooks:
                return False
            self._hook_ids = self._ids()
        return (
            all(map(is_, self._same.present(), self._same.values))
            and list(self._equal.present()) == self._equal.values
            and all(map(is_, map(type, self._modules), self._kinds))
            and [len(table) for _, table in self._counted] == self._counts
            and list(map(_code, self._own_functions)) == self._codes
            and [tensor._version for _, tensor in self._versioned] == self._versions
            and [tensor.data_ptr() for _, tensor in self._placed] == self._addresses
            and global_hooks() == self._global
        )

    def _ids(self) -> list[tuple[int, ...]]:
        return [tuple(table) for _, table in self._hooked]

    def _foreign(self) -> list[tuple[Any, ...]]:
        return [foreign_hooks(table) for _, table in self._hooked]

    def _found(self) -> Iterator[str]:
        for entry, now in self._equal.differing(eq):
            yield f"{entry.label} is {now!r}, it was {entry.value!r}"
        for (name, _), before, now in zip(self._hooked, self._hooks, self._foreign(), strict=True):
            if before != now:
                yield f"a hook of {name or 'the model'} was {'added' if len(now) > len(before) else 'removed'}"
        for entry, _ in self._same.differing(is_):
            yield f"{entry.label} is another one"
        for (name, table), count in zip(self._counted, self._counts, strict=True):
            if len(table) != count:
                yield f"{name or 'the model'} has {len(table)} parts or parameters, it had {count}"
        for module, kind in zip(self._modules, self._kinds, strict=True):
            if type(module) is not kind:
                yield f"a {kind.__name__} has become a {type(module).__name__}"
        for function, code in zip(self._own_functions, self._codes, strict=True):
            if function.__code__ is not code:
                yield f"{function.__qualname__} has other code"
        yield from (
            f"the weights {name} were written to"
            for (name, tensor), version in zip(self._versioned, self._versions, strict=True)
            if tensor._version != version
        )
        yield from (
            f"the weights {name} are in another place"
            for (name, tensor), address in zip(self._placed, self._addresses, strict=True)
            if tensor.data_ptr() != address
        )
        if global_hooks() != self._global:
            yield "a hook of all modules was added or removed"


class _Table:
    """Many entries, looked up all at once."""

    def __init__(self, entries: Iterable[_Entry]) -> None:
        self.entries = list(entries)
        self.values = [entry.value for entry in self.entries]
        self._lookups = [entry.table.get for entry in self.entries]
        self._keys = [entry.key for entry in self.entries]

    def present(self) -> Iterator[Any]:
        return map(call, self._lookups, self._keys)

    def differing(self, same: Callable[[Any, Any], bool]) -> Iterator[tuple[_Entry, Any]]:
        for entry, now in zip(self.entries, self.present(), strict=True):
            if not same(now, entry.value):
                yield entry, now


def _parts(modules: dict[str, Any]) -> Iterator[_Entry]:
    """Yield modules, parameters and buffers in their tables, and forwards of single modules."""
    for name, module in modules.items():
        for table in (module._modules, module._parameters, module._buffers):
            for key, value in table.items():
                if key not in module._non_persistent_buffers_set:
                    yield _Entry(table, key, value, f"{name}.{key}".lstrip("."))
        yield _Entry(vars(module), "forward", vars(module).get("forward"), f"the forward of {name or 'the model'}")


def _buffers(modules: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers, but for tables of frequencies that transformers itself replaces when a prompt is long."""
    for name, module in modules.items():
        changing = any(kind in str(getattr(module, "rope_type", "")) for kind in _CHANGING)
        for key, value in module._buffers.items():
            if value is not None and not (changing and key.endswith("inv_freq")):
                yield f"{name}.{key}".lstrip("."), value


def _settings(modules: dict[str, Any]) -> Iterator[_Entry]:
    """Yield what the configurations of modules say about a forward."""
    configs = {id(module.config): module.config for module in modules.values() if hasattr(module, "config")}
    for config in configs.values():
        for key, value in vars(config).items():
            if not key.startswith("_") and key not in IRRELEVANT_SETTINGS and _is_plain(value):
                kept = value.copy() if isinstance(value, (list, dict, set)) else value
                yield _Entry(vars(config), key, kept, f"{key} of the configuration")


def _attributes(modules: dict[str, Any]) -> Iterator[_Entry]:
    """Yield plain attributes of modules; lists and dictionaries are copied, since they are changed in place."""
    for name, module in modules.items():
        for key, value in vars(module).items():
            if key in _PASSING or (key != "training" and not _is_plain(value)):
                continue
            kept = value.copy() if isinstance(value, (list, dict, set)) else value
            yield _Entry(vars(module), key, kept, f"{key.lstrip('_')} of {name or 'the model'}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) > 0 and all(isinstance(one, _PLAIN) for pair in value.items() for one in pair)
    if isinstance(value, (list, tuple, set)):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)


def _functions(kinds: Iterable[type]) -> Iterator[_Entry]:
    """Yield what the classes of modules define, and what is defined beside them."""
    bases = {base for kind in kinds for base in kind.__mro__ if base is not object}
    for base in bases:
        for key, value in functions_of(base):
            yield _Entry(vars(base), key, value, f"{base.__qualname__}.{key}")
    for module in {sys.modules[base.__module__] for base in bases if is_library_class(base)}:
        for key, value in members(module):
            yield _Entry(vars(module), key, value, f"{module.__name__}.{key}")


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # Some kinds of tensors are made of others and have no memory of their own.
        return 0


def _shortened(found: list[str]) -> list[str]:
    return found if len(found) <= _MOST else [*found[:_MOST], f"and {len(found) - _MOST} more"]
