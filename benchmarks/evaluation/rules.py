"""Rules with deviation transfer and without it: ``cacheblend+transfer``, ``sink_attention-transfer``.

A published rule chooses tokens; what recomputed tokens teach about the others is a matter of its own, which the default
has and the others have not. Both are given to every rule here, so that a table does not mistake one for the other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fused_kv_llm import FusedKVEngine, FusionReport
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.online import FusedPrompt
from fused_kv_llm.selectors import (
    SELECTORS,
    FirstLayersView,
    Probe,
    Selector,
    View,
    resolve_selector,
    transfer_strength,
    variant_selector,
)

__all__ = ["all_rules", "base_name", "prefill", "rule_of"]

_GIVEN, _TAKEN = "+transfer", "-transfer"
# They choose nothing: full reuse is ratio 0, and prefix caching computes all of a prompt that is not an exact prefix.
_WITHOUT_CHOICE = ("full_reuse", "prefix_cache")


@dataclass(frozen=True, slots=True)
class _WithTransfer:
    """A rule's choice, with deviation transfer."""

    base: Selector
    name: str
    transfer: float | None = None

    def view(self, num_layers: int) -> View | FirstLayersView:
        """Return what the rule wants to see."""
        return self.base.view(num_layers)

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return what the rule picks."""
        return self.base.select(probe, budget)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Positions that were chosen before, with deviation transfer."""

    positions: Tensor
    name: str
    transfer: float | None

    def view(self, num_layers: int) -> View:
        """Return that nothing is left to see."""
        return View()

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return the positions."""
        return self.positions


def base_name(name: str) -> str:
    """Return the name of the rule that chooses the tokens."""
    return name.removesuffix(_GIVEN).removesuffix(_TAKEN)


def _transfers(selector: Selector) -> bool:
    return transfer_strength(selector, shifted=True) > 0


def all_rules() -> list[str]:
    """Return every selector that chooses among tokens of plain KV, each with transfer and without."""
    rules = []
    for name, selector in SELECTORS.items():
        if name not in _WITHOUT_CHOICE and variant_selector(selector) is None:
            rules += [name, name + (_TAKEN if _transfers(selector) else _GIVEN)]
    return rules


def rule_of(name: str) -> Selector:
    """Return the selector of a name.

    Parameters
    ----------
    name : str
        A key of ``SELECTORS``, perhaps with "+transfer" or "-transfer".

    Raises
    ------
    ConfigError
        If it is unknown, or the rule has what is to be given, or has not what is to be taken.
    """
    base = resolve_selector(base_name(name))
    if name == base.name:
        return base
    own = _transfers(base)
    if name.endswith(_GIVEN) and not own:
        return _WithTransfer(base, name)
    if name.endswith(_TAKEN) and own:
        return replace(base, name=name, transfer=0.0)
    raise ConfigError(f"selector={name!r}: {base.name!r} {'has' if own else 'is without'} transfer already")


def prefill(
    engine: FusedKVEngine, prompt: str, *, selector: str | Selector | None = None, **options: Any
) -> tuple[FusedPrompt, FusionReport, float]:
    """Do everything up to the first token's logits, as ``FusedKVEngine.prefill`` does, by any of these rules.

    A rule that selects in the first layers of its own pass cannot transfer in that pass. Its choice is made by a pass
    without transfer, whose seconds up to the choice count, and recomputed by a second one.

    Returns
    -------
    FusedPrompt, FusionReport
    float
        Seconds to the first token.
    """
    rule = rule_of(selector) if isinstance(selector, str) else selector
    first: FusionReport | None = None
    if isinstance(rule, _WithTransfer):
        view = rule.view(engine.loaded.geometry.num_layers)
        if isinstance(view, FirstLayersView):
            fused, first = engine.prefill(prompt, selector=rule.base, **options)
            fused.cache.release()
            rule = _Chosen(fused.selected.cpu(), rule.name, rule.transfer)
    started = time.perf_counter()
    fused, report = engine.prefill(prompt, selector=rule, **options)
    ttft_s = time.perf_counter() - started
    if first is not None:
        report.selection_bytes = first.selection_bytes
        for stage in ("probe", "select"):
            report.seconds[stage] = first.seconds.get(stage, 0.0)
            ttft_s += report.seconds[stage]
    return fused, report, ttft_s
