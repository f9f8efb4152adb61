"""Whether a library's code is its own: what somebody has patched in a class, or in the module that it is from.

What a class computes is decided by its functions and by those of its module that they call. Both can be exchanged at
any time, under the same names. What a library itself has written there is in its files, so the present functions are
compared with those: not by their names, which a patch can wear as well, but by their code.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["functions_of", "is_library_class", "is_own", "members", "patches"]

# Their classes are known by their names as long as their code is their own: a new release does not make stored KV
# another model's. What it changes in the numbers, the reference KV tells.
_LIBRARIES = frozenset(
    ("accelerate", "bitsandbytes", "compressed_tensors", "fused_kv_llm", "gptqmodel", "hqq", "optimum", "peft",
     "torch", "torchao", "transformers")
)  # fmt: skip
_KNOWN = _LIBRARIES | sys.stdlib_module_names
_DEPTH = 8
# What all models inherit has to do with forwards only so far. transformers itself patches other parts of it while it
# reads a model, perhaps in another thread.
_COMMON = ("accelerate.", "torch.nn.modules.module", "transformers.")
_OF_MODELS = ("transformers.activations", "transformers.models.")
_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "forward")


def is_library_class(kind: type) -> bool:
    """Return whether a class is one of a known library: its module has it under its name."""
    module = sys.modules.get(kind.__module__)
    return _root(kind.__module__) in _LIBRARIES and getattr(module, kind.__name__, None) is kind


def patches(kinds: Iterable[type]) -> dict[str, Any]:
    """Return what was patched in libraries' classes, and at the top of the modules that they are from.

    Parameters
    ----------
    kinds : iterable of type
        :func:`is_library_class` holds for them.

    Returns
    -------
    dict of str to object
        Dotted names, and what is there instead of the library's own. In a module without a file nothing is known.
    """
    kinds = list(kinds)
    found = {}
    for module in {kind.__module__: sys.modules[kind.__module__] for kind in kinds}.values():
        for name, present in members(module):
            if not (is_own(present) and _is_defined_as(present, module, name)):
                found[f"{module.__name__}.{name}"] = present
    for kind in kinds:
        for name, present in functions_of(kind):
            if not is_own(present) or (name == "forward" and not _is_forward_of(present, kind)):
                found[f"{kind.__module__}.{kind.__qualname__}.{name}"] = present
    return found


def functions_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield names and values of what a class itself defines for forwards and can be called, properties included."""
    common = _is_common(kind.__module__)
    for name, value in vars(kind).items():
        wrapped = isinstance(value, (property, staticmethod, classmethod))
        if (wrapped or (callable(value) and not isinstance(value, type))) and (not common or name in _CALLS):
            yield name, value


def _is_common(module_name: str) -> bool:
    return module_name.startswith(_COMMON) and not module_name.startswith(_OF_MODELS)


def is_own(value: Any) -> bool:
    """Return whether the code of something callable, its decorators' included, is in the files of known libraries."""
    functions = list(_unwrapped(value))
    if not functions:
        return _root(type(value).__module__) in _LIBRARIES
    return all(map(_is_in_file, functions))


def _root(module_name: str) -> str:
    return module_name.partition(".")[0]


def members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the functions that a module's file defines at its top, as they are at present."""
    code = None if _is_common(module.__name__) else _module_code(module.__name__)
    for const in () if code is None else code.co_consts:
        if isinstance(const, CodeType):
            present = vars(module).get(const.co_name)
            if callable(present) and not isinstance(present, type):
                yield const.co_name, present


def _unwrapped(value: Any) -> Iterator[FunctionType]:
    """Yield the functions of something callable: its decorators', outermost first, and what they decorate."""
    for _ in range(_DEPTH):
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, FunctionType):
            yield value
        value = getattr(value, "__wrapped__", None)
        if value is None:
            return


def _is_defined_as(value: Any, module: ModuleType, name: str) -> bool:
    """Return whether something is what a module's file defines under a name, decorated or not."""
    *_, inner = [None, *_unwrapped(value)]
    return inner is None or (inner.__globals__ is vars(module) and inner.__code__.co_name == name)


def _is_forward_of(value: Any, kind: type) -> bool:
    *_, inner = [None, *_unwrapped(value)]
    names = (f"{kind.__qualname__}.forward", "_forward_unimplemented")
    return inner is None or inner.__code__.co_qualname in names


def _is_in_file(function: FunctionType) -> bool:
    module_name = function.__globals__.get("__name__")
    if not isinstance(module_name, str) or _root(module_name) not in _KNOWN:
        return False
    codes = _codes(module_name)
    # Functions that a library makes at run time, such as those of dataclasses, are in no file.
    return codes is None or function.__code__ in codes or function.__code__.co_filename.startswith("<")


@functools.lru_cache(maxsize=256)
def _module_code(name: str) -> CodeType | None:
    """Return the code of a module's file; None where there is none."""
    try:
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        code: CodeType | None = loader.get_code(name)
    except (AttributeError, ImportError, OSError, SyntaxError, ValueError):
        return None
    return code


@functools.lru_cache(maxsize=256)
def _codes(name: str) -> frozenset[CodeType] | None:
    code = _module_code(name)
    return None if code is None else frozenset(_nested(code))


def _nested(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _nested(const)
