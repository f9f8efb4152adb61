"""What decides a model's numbers besides its weights: its modules, adapters, hooks, and what was patched.

None of it is in a state dict. A model that nobody has changed is described by the names of its modules' classes alone,
so that another release of a library does not make its stored KV another model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.nn.modules import module as torch_module

from fused_kv_llm.errors import UnsupportedModelError
from fused_kv_llm.model.adapters import ForwardNames, adapter_layers, adapter_settings
from fused_kv_llm.model.content_hash import ContentHash
from fused_kv_llm.model.fast_forward import FastForward
from fused_kv_llm.model.own_code import is_library_class, patches

__all__ = ["check_compiled", "describe_structure", "foreign_hooks", "global_hooks", "own_forward"]

# Numbers that modules take from the configuration when they are made, and that can be changed afterwards.
_NUMBERS = ("eps", "variance_epsilon", "scaling", "is_causal", "sliding_window", "softcap", "residual_multiplier")
_GLOBAL = ("_global_forward_pre_hooks", "_global_forward_hooks")
# The engine's own, and those of transformers that record outputs and change none.
_HARMLESS = ("fused_kv_llm.", "transformers.utils.output_capturing")


def foreign_hooks(hooks: dict[int, Any]) -> tuple[Any, ...]:
    """Return the hooks of a module that may change what it computes."""
    if not hooks:
        return ()
    return tuple(hook for hook in hooks.values() if not _is_harmless(hook))


def _is_harmless(hook: Any) -> bool:
    scope = getattr(hook, "__globals__", None)
    return scope is not None and str(scope.get("__name__")).startswith(_HARMLESS)


def own_forward(module: Any) -> Any:
    """Return what replaces a module's forward; None where that is its class's, or the engine's fast one."""
    forward = vars(module).get("forward")
    return None if isinstance(forward, FastForward) else forward


def global_hooks() -> tuple[Any, ...]:
    """Return the hooks that are called for all modules of this process."""
    return tuple(hook for table in _GLOBAL for hook in foreign_hooks(getattr(torch_module, table)))


def check_compiled(model: Any, model_id: str) -> None:
    """Refuse a model that was compiled in place, in whole or in part.

    Parameters
    ----------
    model : torch.nn.Module
        What ``torch.compile(model)`` returns has been unwrapped already.
    model_id : str
        Its name, for messages.

    Raises
    ------
    UnsupportedModelError
    """
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        if compiled or hasattr(own_forward(module), "_torchdynamo_orig_callable"):
            where = f"its part {name!r}" if name else "it"
            raise UnsupportedModelError(
                f"The model {model_id!r} is not supported as it is: {where} was compiled in place, and compiled code "
                "would not ask the engine for stored KV. Load it again without compiling it; what "
                "torch.compile(model) returns can be given, and is used uncompiled."
            )


def describe_structure(model: Any) -> str:
    """Hash what decides a model's numbers besides weights and configuration.

    Parameters
    ----------
    model : torch.nn.Module
        Hooks and forwards of the engine do not count.

    Returns
    -------
    str
        128-bit xxh3, hexadecimal.
    """
    names = ForwardNames(model)
    shown = [(short, module) for name, module in model.named_modules() if (short := names(name)) is not None]
    digest = ContentHash(by_class=[module for _, module in shown])
    # Where a layer's adapters are off, the layer below it has its name, and comes after it.
    by_name = dict(shown)
    for name, module in by_name.items():
        digest.add((name, type(module).__name__, _numbers(module)))
    for name, layer in adapter_layers(model):
        settings = adapter_settings(layer)
        if settings:
            digest.add((names(name), settings))
    digest.add(list(_replaced(shown)))
    digest.add(_code_of(type(module) for module in by_name.values()))
    digest.add(global_hooks())
    return digest.hexdigest()


def _numbers(module: Any) -> dict[str, float]:
    present = {name: vars(module).get(name) for name in _NUMBERS}
    return {name: value for name, value in present.items() if isinstance(value, (bool, int, float))}


def _replaced(modules: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield hooks and forwards of single modules."""
    for name, module in modules:
        for table in (module._forward_pre_hooks, module._forward_hooks):
            for hook in foreign_hooks(table):
                yield name, "hook", hook
        forward = own_forward(module)
        if forward is not None:
            yield name, "forward", forward


def _code_of(kinds: Iterable[type]) -> list[tuple[str, Any]]:
    """Return the code that no library answers for: patches, and classes of others."""
    bases = {base for kind in kinds for base in kind.__mro__}
    library = sorted(filter(is_library_class, bases), key=_path)
    others = sorted(bases - set(library), key=_path)
    return [*sorted(patches(library).items()), *((_path(kind), kind) for kind in others)]


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
