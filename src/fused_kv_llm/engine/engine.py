"""``FusedKVEngine``, the face of the library: one model over one store."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, overload

from fused_kv_llm.config import DEFAULT_MODEL, EngineConfig
from fused_kv_llm.online import view_of
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import resolve_selector
from fused_kv_llm.serving import limits_of
from fused_kv_llm.store import resolve_policy

from .calibration_watch import CalibrationWatch
from .chunk_methods import ChunkMethods
from .chunk_order import ChunkOrders
from .constructor import has_options, has_options_after_model, show_options
from .corpus import EngineCorpus, similarity_of
from .explain_methods import ExplainMethods
from .parts import open_parts
from .prefixes import open_prefixes
from .prompt_methods import PromptMethods
from .requests import RequestRunner

__all__ = ["FusedKVEngine"]


class FusedKVEngine(ChunkMethods, PromptMethods, ExplainMethods):
    """Answers prompts from precomputed chunk KV.

    Parameters
    ----------
    model : str, Path, transformers.PreTrainedModel or LoadedModel
        Alias ``"smollm2-135m"``, hub id, local folder, GGUF file, a model in memory, or the result of
        ``load_model``.
    **options
        The other fields of :class:`~fused_kv_llm.config.EngineConfig`, which describes them.

    Attributes
    ----------
    config : EngineConfig
        The options.
    loaded : LoadedModel
    store : KVStore
    renderer : PromptRenderer
    identity : str
        Digest of everything besides its token ids on which a chunk's KV depends.
    model_lock : ModelLock
        Held during every forward; hold it to run the model yourself. Engines that share a model share it.
    corpus : EngineCorpus
        What is done with chunks outside of requests.
    requests : RequestRunner
        What is done with prompts.
    recompute_ratio : float
        The ratio of calls that name none.

    Raises
    ------
    ConfigError
        If an option cannot work.
    ModelNotFoundError, UnsupportedModelError
        If the model cannot be loaded or its KV cannot be moved.
    ModelChangedError
        If it does not compute what its stored KV was computed with.
    StoreUnavailableError
        If the folder cannot be used.
    """

    @overload
    @has_options(EngineConfig)
    def __init__(self) -> None: ...

    @overload
    @has_options_after_model(EngineConfig)
    def __init__(self, model: Any) -> None: ...

    @show_options
    def __init__(self, model: Any = DEFAULT_MODEL, **options: Any) -> None:
        self.config = config = EngineConfig(model=model, **options)
        # Wrong options are refused before the model is loaded, which takes long.
        similarity = similarity_of(config)
        resolve_selector(config.selector)
        resolve_policy(config.prefix_policy, "prefix_policy")
        parts = open_parts(config)
        self.loaded, self.store, self.renderer = parts.loaded, parts.store, parts.renderer
        self.identity, self.model_lock = parts.identity, parts.model_lock
        self._parts, self._orders = parts, ChunkOrders()
        self._watch = CalibrationWatch(parts.store, parts.identity, parts.preprocessed)
        try:
            # First, since it may be refused: the corpus opens a file of its own.
            self.recompute_ratio, self._selector = self._asked(config.recompute_ratio, config.selector)
            self._recipe(None, None, 0)
            self._calibration = self.calibration() if config.recompute_ratio == "auto" else None
            self.corpus = EngineCorpus(
                parts,
                similarity,
                view_of(self._selector, self.loaded, parts.shift_name, FusionReport()),
                store_misses=config.store_misses,
                variants=config.variants,
                variant_bytes=config.variant_bytes,
                batch_tokens=config.batch_tokens,
            )
            limits = limits_of(config, parts.loaded.device)
            self.store.wait_at_most(config.load_timeout_s)
            prefixes = open_prefixes(config.prefix_policy, limits, parts.loaded.device, self.corpus.cost)
            self.corpus.adopt_from(prefixes, parts)
            self.requests = RequestRunner(parts, self.corpus, limits, prefixes, config.tenant)
        except BaseException:
            self.store.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self.requests.closed

    def close(self) -> None:
        """Give up unanswered requests, finish the batch in the background, close the store; the model stays usable."""
        self.requests.close()
        self.corpus.close()
        self.store.close()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()
