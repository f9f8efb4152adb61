"""The constructor's signature: the options of ``EngineConfig``, as type checkers, editors and ``help()`` show them.

A ``ParamSpec`` takes the signature over, so that no list of options is kept here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from fused_kv_llm.config import EngineConfig

__all__ = ["has_options", "has_options_after_model", "show_options"]

_Options = ParamSpec("_Options")
_Engine = TypeVar("_Engine")
_Init = TypeVar("_Init", bound=Callable[..., None])


def has_options(
    config: Callable[_Options, EngineConfig],
) -> Callable[[Callable[[_Engine], None]], Callable[Concatenate[_Engine, _Options], None]]:
    """Declare that a constructor takes the options of a configuration, all by name."""
    return lambda declared: declared  # type: ignore[return-value]


def has_options_after_model(
    config: Callable[_Options, EngineConfig],
) -> Callable[[Callable[[_Engine, Any], None]], Callable[Concatenate[_Engine, Any, _Options], None]]:
    """Declare that a constructor takes a model and then the options of a configuration by name."""
    return lambda declared: declared  # type: ignore[return-value]


def show_options(constructor: _Init) -> _Init:
    """Let ``inspect.signature`` and ``help`` show the options instead of ``**options``."""
    model, *others = inspect.signature(EngineConfig).parameters.values()
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    model = model.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    constructor.__signature__ = inspect.Signature([first, model, *others])  # type: ignore[attr-defined]
    return constructor
