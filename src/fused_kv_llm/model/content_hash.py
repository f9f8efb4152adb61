"""Hashing by content: tensors of any kind, and functions with everything that they hold."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Set
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import xxhash
from torch import Tensor

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model.own_code import functions_of, is_library_class, is_own

__all__ = ["ContentHash", "hash_of"]

_DEPTH = 8
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


def hash_of(value: Any) -> str:
    """Return the hash of one value; see :meth:`ContentHash.add`."""
    digest = ContentHash()
    digest.add(value)
    return digest.hexdigest()


class ContentHash:
    """A 128-bit xxh3 over values of many kinds.

    Two values with the same hash are the same as far as can be seen: of an object that is neither a tensor nor plain,
    that is its class and its attributes, of a function its code, its defaults, and what it reads from outside.

    Parameters
    ----------
    by_class : iterable of object
        Objects whose class counts only, because they are hashed elsewhere.
    """

    def __init__(self, by_class: Iterable[Any] = ()) -> None:
        self._digest = xxhash.xxh3_128()
        # By id, with the objects, so that no id is used twice.
        self._seen: dict[int, tuple[Any, str]] = {id(one): (one, type(one).__qualname__) for one in by_class}
        self._depth = 0

    def hexdigest(self) -> str:
        """Return 32 hexadecimal digits."""
        return str(self._digest.hexdigest())

    def add(self, value: Any) -> None:
        """Add a value.

        Parameters
        ----------
        value : object
            Tensors of all layouts and subclasses count by their elements.

        Raises
        ------
        ConfigError
            If a tensor has no elements in memory.
        """
        if isinstance(value, _PLAIN + _OF_TORCH):
            self._text(type(value).__name__, repr(value))
        elif id(value) in self._seen or self._depth > _DEPTH:
            self._text("known", self._seen.get(id(value), (value, type(value).__qualname__))[1])
        else:
            self._seen[id(value)] = value, str(len(self._seen))
            self._depth += 1
            self._add_new(value)
            self._depth -= 1

    def _add_new(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, CodeType):
            self._text("code", value.co_qualname, repr(value.co_names), str(value.co_flags))
            self._digest.update(value.co_code)
            self.add(value.co_consts)
        elif isinstance(value, (FunctionType, MethodType, functools.partial)):
            self._function(value)
        elif isinstance(value, Mapping):
            self._text("mapping", str(len(value)))
            for pair in sorted(value.items(), key=lambda item: repr(item[0])):
                self.add(pair)
        elif isinstance(value, (list, tuple)):
            self._text("sequence", str(len(value)))
            for item in value:
                self.add(item)
        elif isinstance(value, Set):
            # Sets have no order, and that of their hashes changes from process to process.
            self.add(sorted(map(hash_of, value)))
        else:
            self._object(value)

    def _text(self, *parts: str) -> None:
        self._digest.update("\x1f".join((*parts, "\x1e")).encode())

    def _tensor(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._text("tensor", type(tensor).__name__, str(tensor.dtype), str(tuple(tensor.shape)))
        if tensor.device.type == "meta":
            raise ConfigError("Weights on the meta device, or offloaded, have no content: load them into memory.")
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            self.add(context)
            for name in names:
                self.add(getattr(tensor, name))
        elif tensor.is_quantized:
            self._text("quantized", str(tensor.qscheme()))
            per_tensor = tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
            about = ("q_scale", "q_zero_point") if per_tensor else ("q_per_channel_scales", "q_per_channel_zero_points")
            for part in (tensor.int_repr(), *(getattr(tensor, name)() for name in about)):
                self.add(part)
        elif tensor.layout != torch.strided:
            self._text("layout", str(tensor.layout))
            self.add(tensor.to_dense())
        else:
            flat = tensor.to("cpu").contiguous().view(-1)
            self._digest.update(flat.view(torch.uint8).numpy().data)

    def _function(self, value: Any) -> None:
        if isinstance(value, functools.partial):
            self.add(("partial", value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            self.add(("method", value.__func__, value.__self__))
        else:
            self._text("function", value.__module__ or "", value.__qualname__)
            if not is_own(value):
                self.add(value.__code__)
                self.add({name: value.__globals__[name] for name in _read(value.__code__) if name in value.__globals__})
            self.add((value.__defaults__, value.__kwdefaults__))
            self.add([_content(cell) for cell in value.__closure__ or ()])

    def _object(self, value: Any) -> None:
        if isinstance(value, ModuleType):
            self._text("module", value.__name__)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._class(type(value))
            # What loggers, locks and their like hold changes from process to process.
            if _root(type(value)) not in sys.stdlib_module_names:
                self.add(getattr(value, "__dict__", None))

    def _class(self, kind: type) -> None:
        self._text("class", kind.__module__, kind.__qualname__)
        if not is_library_class(kind) and _root(kind) not in sys.stdlib_module_names:
            for name, function in functions_of(kind):
                self.add((name, function.fget if isinstance(function, property) else function))
            for base in kind.__bases__:
                self.add(base)


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _read(code: CodeType) -> set[str]:
    """Return the names that a function and those inside it look up."""
    inner = [_read(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)
