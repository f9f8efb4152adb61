"""What a selector asks to see of a request before it decides."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError

__all__ = ["AnchorRule", "Anchors", "FirstLayersView", "View"]

AnchorRule = Literal["kvzip", "knorm", "knorm_high", "sink"]


@dataclass(frozen=True, slots=True)
class Anchors:
    """The tokens of every chunk that stand for it in the probe (QCFuse section 3.3.1).

    Parameters
    ----------
    rule : {"kvzip", "knorm", "knorm_high", "sink"}
        How they are ranked, see :mod:`fused_kv_llm.offline.anchors`; ``knorm`` by the lowest key norms (Devoto et al.
        2024), ``knorm_high`` by the highest, as phase 1 of QCFuse's demonstration has it.
    ratio : float
        Share of a chunk's tokens, rounded up, in (0, 1]. 1 keeps them all, whatever the rule.
    storage : {"auto", "int8", "int4"}
        How their KV is stored beside that of the chunk: in the chunk's dtype or, with about half of bfloat16's bytes to
        read, or a quarter, in eight bits or in four.
    shifted : bool
        Whether they are also stored as most places in a prompt change them, for chunks that do not come first: with 0.8
        of their context shift, if the engine adds context shifts.

    Raises
    ------
    ConfigError
        If there is no such rule or storage, or the ratio is out of range.
    """

    rule: AnchorRule = "kvzip"
    ratio: float = 0.1
    storage: Literal["auto", "int8", "int4"] = "auto"
    shifted: bool = False

    def __post_init__(self) -> None:
        if self.rule not in get_args(AnchorRule):
            raise ConfigError(f"rule={self.rule!r} ranks no anchors: use one of {', '.join(get_args(AnchorRule))}")
        if not 0.0 < self.ratio <= 1.0:
            raise ConfigError(f"ratio={self.ratio!r} of anchors is outside (0, 1]: 0.1 keeps a tenth of every chunk")
        if self.storage not in ("auto", "int8", "int4"):
            raise ConfigError(f"storage={self.storage!r} of anchors is unknown: use 'auto', 'int8' or 'int4'")


@dataclass(frozen=True, slots=True)
class View:
    """The question's attention to the chunks: a probe that computes the question's rows only.

    Parameters
    ----------
    layers : tuple of int
        Layers whose question-to-context attention is needed; empty for a selector that needs no probe.
    full_context : bool
        Whether the question attends to the chunks' stored KV on its way through the layers (anchor ratio 1)
        or only to the prompt's prefix and itself (anchor ratio 0).
    anchors : Anchors or None
        The question attends to these tokens instead of the whole context. Then sidecars are read, not the chunks' KV.
    critical : bool
        Whether the engine is to put the model's critical layers in for `layers`; then there are no `groups`.
    profiled : bool
        Whether it is to put in anchors that were profiled for the model, if there are, for `anchors`.
    groups : tuple of tuple of int
        Groups of `layers`, which have to cover all of them and may overlap. A token's score is averaged in each group,
        and the geometric mean of these averages counts. Empty for one average over all `layers`.
    plain_layers : tuple of int
        What the engine is to put in for `layers` if it adds no context shifts; empty leaves them as they are.
    anchor_shift : str or None
        Name of the context shifts that anchors are stored with, too; the engine puts in its own for anchors that are
        to be `shifted`.

    Raises
    ------
    ConfigError
        If there are groups, and they are not all of `layers`, or the layers are critical ones.
    """

    layers: tuple[int, ...] = ()
    full_context: bool = False
    anchors: Anchors | None = None
    critical: bool = False
    profiled: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    plain_layers: tuple[int, ...] = ()
    anchor_shift: str | None = None

    def __post_init__(self) -> None:
        if self.groups and ({*chain(*self.groups)} != {*self.layers} or self.critical):
            raise ConfigError(
                f"groups={self.groups!r} do not cover layers={self.layers!r}: put each of these layers, and no other, "
                "into at least one group; a view with critical=True has no groups"
            )

    def averaged(self, by_layer: Tensor) -> Tensor:
        """Return the scores of the tokens ``[C]`` from those in every layer ``[len(layers), C]``, float32."""
        if not self.groups:
            return by_layer.mean(0)
        rows = [[self.layers.index(layer) for layer in group] for group in self.groups]
        return torch.stack([by_layer[group].mean(0) for group in rows]).log().mean(0).exp()

    @property
    def read_first(self) -> tuple[int, ...]:
        """Layers whose chunk KV is needed before anything is selected; none with anchors, which come from sidecars."""
        if self.anchors is not None or not self.layers:
            return ()
        return tuple(range(max(self.layers) + 1)) if self.full_context else self.layers


@dataclass(frozen=True, slots=True)
class FirstLayersView:
    """The first layers of the fused pass: all rows of the prompt go through them, and the selected ones go on.

    With nothing to look at but a focus, only the selected rows begin.

    Parameters
    ----------
    deviation : tuple of int
        Ascending layers at which fresh keys and values are compared with the stored ones. After each of them only the
        best rows go on. A row that is dropped at layer ``i`` has fresh KV up to layer ``i``, and its stored KV from
        layer ``i + 1`` on.
    keep : tuple of float
        How many rows go on after each of these layers, as multiples of the budget; the last is 1.
    attention : tuple of int
        Layers over which the attention among the prompt's tokens is averaged.
    focus_window : int
        Rows of chunks outside the question's focus are dropped once the focus has been the same for so many layers
        (Cache-Craft algorithm 1); 0 drops none.

    Raises
    ------
    ConfigError
        If there is no layer to look at.
    """

    deviation: tuple[int, ...] = ()
    keep: tuple[float, ...] = ()
    attention: tuple[int, ...] = ()
    focus_window: int = 0

    def __post_init__(self) -> None:
        if not self.layers and not self.focus_window:
            raise ConfigError("A view of the first layers needs at least one: list layers in deviation or attention.")

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that are needed before anything is selected: all up to the last one looked at."""
        return tuple(range(max((*self.deviation, *self.attention), default=-1) + 1))

    @property
    def read_first(self) -> tuple[int, ...]:
        """The same layers: what they show is compared with the chunks' KV."""
        return self.layers
