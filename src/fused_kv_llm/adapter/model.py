"""Options and engine that every framework's fused-KV language model has in common."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, field_serializer

from fused_kv_llm.config import (
    DEFAULT_MEMORY_BYTES,
    DEFAULT_NEIGHBOURS,
    DEFAULT_PREPROCESSING,
    DEFAULT_RATIO,
    DEFAULT_SELECTOR,
    check_ratio,
    parse_bytes,
)
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import resolve_selector
from fused_kv_llm.store import DEFAULT_POLICY, public_url

from .corpus import ModelCorpus
from .runtime import Runtime
from .sharing import EngineLease, lease_engine

__all__ = ["PER_CALL_OPTIONS", "FusedKVModel"]

PER_CALL_OPTIONS = ("recompute_ratio", "selector", "max_tokens", "temperature", "top_p", "seed")

_ENGINE_OPTIONS = {
    "model": "model",
    "tokenizer": "tokenizer",
    "kv_dir": "kv_dir",
    "dtype": "dtype",
    "device": "device",
    "tenant": "tenant",
    "store_misses": "store_misses",
    "memory_bytes": "memory_bytes",
    "disk_bytes": "disk_bytes",
    "policy": "policy",
    "kv_dtype": "kv_dtype",
    "remote": "remote",
    "preprocessing": "preprocessing",
    "num_neighbours": "num_neighbours",
    "embedder": "embedder",
}


def _ratio(value: Any) -> Any:
    return value if value == "auto" else check_ratio(value)


def _memory(value: Any) -> int:
    return parse_bytes(value, "memory_bytes")


def _disk(value: Any) -> int | None:
    return None if value is None else parse_bytes(value, "disk_bytes")


class FusedKVModel(ModelCorpus, BaseModel):
    """Fields and engine of a fused-KV language model; see :class:`langchain_fused_kv.FusedKVLLM` for them.

    Objects with the same engine options share one engine, and with it the weights.
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    model: Any = Field(default="smollm2-135m", frozen=True)
    tokenizer: Any = Field(default=None, frozen=True, repr=False)
    kv_dir: str | Path = Field(default="./kv", frozen=True)
    recompute_ratio: Annotated[float | Literal["auto"], PlainValidator(_ratio)] = DEFAULT_RATIO
    selector: Any = DEFAULT_SELECTOR
    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    stop: list[str] | None = None
    seed: int | None = None
    dtype: Any = Field(default=None, frozen=True)
    device: Any = Field(default=None, frozen=True)
    tenant: str = Field(default="", frozen=True)
    store_misses: bool = Field(default=True, frozen=True)
    memory_bytes: Annotated[int, PlainValidator(_memory)] = Field(default=DEFAULT_MEMORY_BYTES, frozen=True)
    disk_bytes: Annotated[int | None, PlainValidator(_disk)] = Field(default=None, frozen=True)
    policy: str = Field(default=DEFAULT_POLICY, frozen=True)
    kv_dtype: str = Field(default="auto", frozen=True)
    remote: str | None = Field(default=None, frozen=True, repr=False)
    preprocessing: str = Field(default=DEFAULT_PREPROCESSING, frozen=True)
    num_neighbours: int = Field(default=DEFAULT_NEIGHBOURS, ge=1, frozen=True)
    embedder: Any = Field(default=None, frozen=True, exclude=True, repr=False)
    # A field, not a private attribute: LangChain's configurable_fields() copies a model by its fields.
    runtime: Any = Field(default=None, frozen=True, exclude=True, repr=False)

    @field_serializer("remote")
    def _public_remote(self, remote: str | None) -> str | None:
        """Keep a password out of everything that is written down or sent to a tracer."""
        return None if remote is None else public_url(remote)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; pydantic's own refusal of a frozen one would quote a password."""
        if name == "remote":
            raise ConfigError(f"remote cannot change once the model is loaded: make another {type(self).__name__}")
        super().__setattr__(name, value)

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(_readable(error, type(self))) from error
        settings = {name: getattr(self, name) for name in self._engine_options()}
        if self.runtime is None:
            resolve_selector(self.selector)
            theirs = {their: settings[our] for our, their in self._engine_options().items()}
            self.__dict__["runtime"] = Runtime(lease_engine({"wrap": True, **theirs}), settings)
        elif changed := [name for name, value in settings.items() if value != self.runtime.settings[name]]:
            raise ConfigError(
                f"{', '.join(changed)} cannot change once the model is loaded: make another "
                f"{type(self).__name__} for that"
            )

    @classmethod
    def _engine_options(cls) -> dict[str, str]:
        """Return the fields that belong to the engine, with the engine's names for them."""
        return _ENGINE_OPTIONS

    @classmethod
    def from_engine(cls, engine: FusedKVEngine, **options: Any) -> Self:
        """Return a model on an engine that exists already, so that several share its weights and its store.

        Parameters
        ----------
        engine : FusedKVEngine
            Gives the weights, the store, and the default ratio and selector.
        **options
            Fields of this class that do not belong to the engine: recompute_ratio, selector, max_tokens,
            temperature, top_p, stop, seed, and the framework's own (callbacks, cache, tags, ...).

        Raises
        ------
        ConfigError
            If an option belongs to the engine.

        Examples
        --------
        >>> import tempfile
        >>> from fused_kv_llm import FusedKVEngine
        >>> from langchain_fused_kv import FusedKVLLM
        >>> engine = FusedKVEngine("smollm2-135m", kv_dir=tempfile.mkdtemp())
        >>> short, long = (FusedKVLLM.from_engine(engine, max_tokens=n) for n in (16, 512))
        >>> short.engine is long.engine
        True
        """
        refused = sorted(set(options) & set(cls._engine_options()))
        if refused:
            raise ConfigError(
                f"{', '.join(refused)} belong to the engine, which exists already: set them in FusedKVEngine(...)"
            )
        settings = {name: cls.model_fields[name].default for name in cls._engine_options()}
        settings |= {"model": engine.model_id, "kv_dir": engine.store.kv_dir, "dtype": engine.dtype}
        defaults = {"recompute_ratio": engine.recompute_ratio, "selector": None}
        return cls(**{**settings, **defaults, **options, "runtime": Runtime(EngineLease(engine), settings)})

    @property
    def engine(self) -> FusedKVEngine:
        """The engine behind this model."""
        return self._runtime.engine

    @property
    def _runtime(self) -> Runtime:
        return cast("Runtime", self.runtime)

    @property
    def last_report(self) -> FusionReport | None:
        """Report of the request that ended last, from whichever thread; None before the first.

        Under concurrency read ``generation_info["fused_kv"]`` of the result instead.
        """
        return self._runtime.last_report

    @property
    def identity(self) -> dict[str, Any]:
        """Everything besides the prompt and the stored chunks on which an answer depends."""
        selector = self.engine.selector if self.selector is None else self.selector
        return {
            "model": self.engine.model_id,
            "model_fingerprint": self.engine.model_fingerprint,
            "kv_identity": self.engine.identity,
            "kv_dir": str(self.engine.store.kv_dir.resolve()),
            "dtype": self.engine.dtype,
            "tenant": self.tenant,
            "wrap_chat_template": self.engine.wrap,
            **{name: getattr(self, name) for name in PER_CALL_OPTIONS},
            "selector": selector if isinstance(selector, str) else repr(selector),
            # Not "stop": LangChain overwrites that entry with the stop strings of the call.
            "default_stop": list(self.stop or ()),
        }

    def announce_retrieval(self, texts: Sequence[str]) -> None:
        """Remember retrieved texts; the user is warned once if none of them is in the next prompt.

        Parameters
        ----------
        texts : sequence of str
        """
        self._runtime.retrievals.add(texts)

    def close(self) -> None:
        """Give the engine back; it is closed with the last of the models that share it."""
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _engine_call(self, stop: Sequence[str] | None, overrides: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(overrides) - set(PER_CALL_OPTIONS))
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)} cannot be set for one call; what can: {', '.join(PER_CALL_OPTIONS)} and stop"
            )
        stops = dict.fromkeys([*(self.stop or ()), *(stop or ())])
        return {**{name: getattr(self, name) for name in PER_CALL_OPTIONS}, **overrides, "stop": tuple(stops)}


def _readable(error: ValidationError, cls: type[FusedKVModel]) -> str:
    parts = []
    for problem in error.errors():
        name = ".".join(str(place) for place in problem["loc"])
        if problem["type"] == "extra_forbidden":
            names = [field for field in cls.model_fields if field != "runtime"]
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"its options: {', '.join(names)}"
            if name == "engine":
                hint = f"use {cls.__name__}.from_engine(engine, ...)"
            parts.append(f"{cls.__name__} has no option {name!r}; {hint}")
        else:
            given = public_url(problem["input"]) if name == "remote" else repr(problem["input"])
            parts.append(f"{name}={given} cannot work: {problem['msg']}")
    return "; ".join(parts)
