"""Options and engine that every framework's fused-KV language model has in common."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, Self, cast

from pydantic import ConfigDict, Field, field_serializer

from fused_kv_llm.config import EngineConfig
from fused_kv_llm.engine import FusedKVEngine, Speculation
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.report import FusionReport
from fused_kv_llm.store import public_url

from .corpus import ModelCorpus
from .runtime import Runtime
from .sharing import EngineLease, lease_engine

__all__ = ["PER_CALL_OPTIONS", "FusedKVModel"]

PER_CALL_OPTIONS = ("recompute_ratio", "selector", "max_tokens", "temperature", "top_p", "seed")

_FIXED = tuple(name for name, field in EngineConfig.model_fields.items() if field.frozen)


class FusedKVModel(ModelCorpus, EngineConfig):
    """Options and engine of a fused-KV language model.

    The options are those of :class:`~fused_kv_llm.config.EngineConfig` and the ones below. Objects with the same
    engine options share one engine, and with it the weights.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=False)

    max_tokens: int = Field(default=256, ge=1)
    """Longest answer, in tokens."""

    temperature: float = Field(default=0.0, ge=0.0)
    """0 takes the most likely token every time; higher values sample."""

    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sampling considers the smallest set of tokens whose probability reaches this."""

    stop: list[str] | None = None
    """Strings before which an answer ends; those of a call are added to these."""

    seed: int | None = None
    """Makes sampling repeatable."""

    # A field, not a private attribute: LangChain's configurable_fields() copies a model by its fields.
    runtime: Any = Field(default=None, frozen=True, exclude=True, repr=False)

    @field_serializer("remote")
    def _public_remote(self, remote: str | None) -> str | None:
        """Keep passwords out of everything that is serialised or sent to a tracer."""
        return None if remote is None else public_url(remote)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; pydantic's own refusal of a frozen one would quote a password."""
        if name == "remote":
            raise ConfigError(f"remote cannot change once the model is loaded: make another {type(self).__name__}")
        super().__setattr__(name, value)

    def model_post_init(self, context: Any) -> None:
        """Lease the engine, unless this is a copy that has one."""
        super().model_post_init(context)
        config = EngineConfig(**{name: getattr(self, name) for name in EngineConfig.model_fields})
        if self.runtime is None:
            self.__dict__["runtime"] = Runtime(lease_engine(config), config)
        elif changed := [name for name in _FIXED if getattr(config, name) != getattr(self._runtime.config, name)]:
            raise ConfigError(
                f"{', '.join(changed)} cannot change once the model is loaded: make another "
                f"{type(self).__name__} for that"
            )

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
        refused = sorted(set(options) & set(_FIXED))
        if refused:
            raise ConfigError(
                f"{', '.join(refused)} belong to the engine, which exists already: set them in FusedKVEngine(...)"
            )
        # As names, not objects: these fields are shown and serialised.
        given = {"model": engine.model_id, "tokenizer": None, "dtype": engine.dtype, "kv_dir": engine.store.kv_dir}
        config = engine.config.model_copy(update={**given, "recompute_ratio": engine.recompute_ratio, "selector": None})
        return cls(**{**dict(config), **options, "runtime": Runtime(EngineLease(engine), config)})

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

    @classmethod
    def _hint(cls, unknown: str) -> str:
        if unknown == "engine":
            return f"use {cls.__name__}.from_engine(engine, ...)"
        return super()._hint(unknown)

    def announce_retrieval(self, texts: Sequence[str], scores: Sequence[float | None] = ()) -> None:
        """Remember retrieved texts; the user is warned once if none of them is in the next prompt.

        Parameters
        ----------
        texts : sequence of str
        scores : sequence of float or None
            What the retriever gave each text, for the report's verdicts; empty where it gave nothing.
        """
        self._runtime.retrievals.add(texts, scores)

    def speculate(self) -> Speculation:
        """Begin to propose prompts while a search goes on, see :meth:`fused_kv_llm.FusedKVEngine.speculate`."""
        return self.engine.speculate(**self._engine_call(None, {}))

    def close(self) -> None:
        """End the use of the engine, which is closed when none of the models that share it is left."""
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
