"""What an engine is: its model, where it runs, and how its KV is stored."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from fused_kv_llm.config import EngineConfig, RecomputeRatio, check_ratio
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model import LoadedModel, ModelLock
from fused_kv_llm.online import Adaptive, Recipe, round_ratios
from fused_kv_llm.prompt import PromptRenderer
from fused_kv_llm.selectors import FirstLayersView, PrefixCache, Selector, resolve_selector
from fused_kv_llm.store import KVStore

from .calibration import Calibration, read_calibration
from .calibration_watch import CalibrationWatch
from .chunk_order import ChunkOrders
from .corpus import EngineCorpus
from .corpus_state import CorpusState, read_corpus_state
from .parts import EngineParts
from .requests import RequestRunner

__all__ = ["EngineState"]


class EngineState:
    """What the methods of an engine work with; :class:`~fused_kv_llm.FusedKVEngine` describes and sets it."""

    config: EngineConfig
    loaded: LoadedModel
    store: KVStore
    renderer: PromptRenderer
    identity: str
    model_lock: ModelLock
    corpus: EngineCorpus
    requests: RequestRunner
    recompute_ratio: float | Literal["adaptive"]
    _parts: EngineParts
    _selector: Selector
    _orders: ChunkOrders
    _watch: CalibrationWatch
    _calibration: Calibration | None

    def check_recipe(
        self, *, recompute_ratio: RecomputeRatio | None = None, selector: str | Selector | None = None
    ) -> None:
        """Refuse a ratio and a selector as a request with them would be, without computing anything.

        Parameters
        ----------
        recompute_ratio : float, "auto", "adaptive" or None
            None takes the engine's.
        selector : str, Selector or None
            None takes the engine's.

        Raises
        ------
        ConfigError
            If one of them cannot be used, or not both together.
        """
        self._recipe(recompute_ratio, selector, seed=0)

    def _recipe(self, ratio: RecomputeRatio | None, selector: str | Selector | None, seed: int) -> Recipe:
        """Return how a call's prompt is fused: at ratio 1 where only exact prefixes are reused.

        Raises
        ------
        ConfigError
            If a ratio or a selector cannot be used, or not together.
        """
        asked, found = self._asked(ratio, selector)
        if isinstance(found, PrefixCache):
            return Recipe(found, 1.0, seed)
        if asked != "adaptive":
            return Recipe(found, asked, seed)
        if isinstance(found.view(self.loaded.geometry.num_layers), FirstLayersView):
            raise ConfigError(
                f"recompute_ratio='adaptive' cannot be had with selector={found.name!r}, which selects while it "
                "recomputes: take one that ranks the tokens before, such as 'sink_attention', or give recompute_ratio "
                "a number"
            )
        adaptive = Adaptive(self.config.adaptive_target, self.config.adaptive_cap)
        return Recipe(found, round_ratios(adaptive.most)[0], seed, adaptive=adaptive)

    def _asked(
        self, ratio: RecomputeRatio | None, selector: str | Selector | None
    ) -> tuple[float | Literal["adaptive"], Selector]:
        """Return the ratio and the selector that were asked for; a calibration gives both."""
        if ratio == "auto":
            found = self.calibration()
            return found.recompute_ratio, found.resolved()
        return (
            self.recompute_ratio if ratio is None else ratio if ratio == "adaptive" else check_ratio(ratio),
            self._selector if selector is None else resolve_selector(selector),
        )

    def _calibration_warnings(self, ratio: RecomputeRatio | None) -> tuple[str, ...]:
        """Return what a report is to say of the calibration that a call rests on, if any."""
        found = self._calibration if ratio is None else None
        if ratio == "auto":
            found = self.calibration()
        warning = None if found is None else self._watch.warning(found)
        return () if warning is None else (warning,)

    def calibration(self) -> Calibration:
        """Return what ``recompute_ratio="auto"`` rests on.

        Raises
        ------
        ConfigError
            If this model, tenant and preprocessing have no calibration in the store, or it cannot be understood.
        """
        return read_calibration(self.store.kv_dir, self.fusion_identity)

    def calibration_changes(self) -> list[str]:
        """Return why :meth:`calibration`, which it raises as, may not hold any more; empty if nothing speaks so."""
        return self._watch.changes(self.calibration())

    def corpus_state(self, selector: Selector) -> CorpusState:
        """Return what a calibration of a selector would be made on now."""
        return read_corpus_state(self.store, self.identity, self._parts.preprocessed, selector)

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.loaded.tokenizer

    @property
    def model_id(self) -> str:
        """Alias, path, hub id or class name of the model."""
        return self.loaded.model_id

    @property
    def model_fingerprint(self) -> str:
        """Content fingerprint of the weights."""
        return self.loaded.fingerprint

    @property
    def device(self) -> str:
        """Where the model is, for example ``"cpu"``."""
        return str(self.loaded.device)

    @property
    def dtype(self) -> str:
        """Compute dtype, for example ``"bfloat16"``."""
        return self._parts.dtype

    @property
    def kv_dtype(self) -> str:
        """Dtype in which keys and values are stored; ``"auto"`` is :attr:`dtype`."""
        return self._parts.kv_dtype

    @property
    def choice(self) -> str:
        """Which dtype and device are used, and why."""
        return self.loaded.choice

    @property
    def selector(self) -> str:
        """Name of the default selector."""
        return self._selector.name

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._parts.context_length

    @property
    def fusion_identity(self) -> str:
        """Digest of what fused KV depends on besides the prompt: :attr:`identity` and the preprocessing in use."""
        made = self._parts.preprocessed
        return self.identity if made is None else hashlib.sha256(f"{self.identity}:{made}".encode()).hexdigest()
