"""What a selector is told and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError, FusedKVError

from .views import FirstLayersView, View

__all__ = [
    "Probe",
    "ScoringSelector",
    "Selector",
    "TransferringSelector",
    "checked_selection",
    "required",
    "transfer_strength",
]

_TRANSFERRED = {False: 0.5, True: 0.25}
"""By whether KV has context shifts, see :func:`transfer_strength`."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a selector knows about one request.

    Parameters
    ----------
    positions : Tensor
        int64 ``[C]``, ascending prompt positions of the chunk tokens whose stored KV could be reused.
    chunk_index : Tensor
        int64 ``[C]``, which chunk of the prompt each belongs to: 0, 1, ...
    offset : Tensor
        int64 ``[C]``, how many reusable tokens of its chunk stand before it.
    scores : Tensor or None
        float32 ``[C]``, question-to-token attention, averaged over the view's layers as :meth:`View.averaged` does;
        None without a view.
    seed : int
        For selectors that draw.
    deviation : Tensor or None
        float32 ``[C]``, at the last compared layer of a :class:`FirstLayersView`: Euclidean distance of each token's
        fresh keys and values from the stored ones; minus infinity for tokens that were dropped before.
    received : Tensor or None
        float32 ``[C]``, attention each token receives, summed over the prompt's tokens, averaged over heads and
        over the view's `attention` layers.
    received_within : Tensor or None
        The same, summed over the tokens of its own chunk only.
    given : Tensor or None
        float32 ``[C, K]``, attention each token gives to every one of the ``K`` chunks, averaged alike.
    overhead : Tensor or None
        float64 ``[K]``, cache fix overhead of each chunk's stored KV; None unless a :class:`.VariantSelector` chooses.
    recorded : Tensor or None
        float32 ``[C]``, attention that each token gave to the chunks before its own when its KV was stored; 0 where it
        was stored behind none. None where `overhead` is.
    numbers : Tensor or None
        int64 ``[C]``, which number in the prompt's text each token belongs to: the same for those of one number in one
        chunk, and -1 for none. None where it is not known which characters the tokens stand for.
    has_first_chunk : bool
        Whether chunk 0 is the prompt's first: no chunk stands before it whose KV is known from an earlier prompt, or
        could not be opened. A chunk that the store has lost is text like any other.
    """

    positions: Tensor
    chunk_index: Tensor
    offset: Tensor
    scores: Tensor | None = None
    seed: int = field(default=0)
    deviation: Tensor | None = None
    received: Tensor | None = None
    received_within: Tensor | None = None
    given: Tensor | None = None
    overhead: Tensor | None = None
    recorded: Tensor | None = None
    numbers: Tensor | None = None
    has_first_chunk: bool = True


@runtime_checkable
class Selector(Protocol):
    """A rule that picks the chunk tokens to recompute."""

    @property
    def name(self) -> str:
        """Name under which it is chosen and reported."""

    def view(self, num_layers: int) -> View | FirstLayersView:
        """Return what it needs to see of a model with `num_layers` layers."""

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return int64 positions, ascending, all in ``probe.positions``, at most `budget` of them."""


@runtime_checkable
class TransferringSelector(Selector, Protocol):
    """A selector whose recomputed tokens also correct the others of their chunk."""

    @property
    def transfer(self) -> float | None:
        """Share of a chunk's mean KV deviation that is transferred, in [0, 1]; None: :func:`transfer_strength` says."""


def transfer_strength(selector: Selector, *, shifted: bool) -> float:
    """Return the share of a chunk's mean KV deviation that a selector transfers; 0 for one that transfers nothing.

    A context shift has taken away most of what a chunk's tokens have in common, so less of what is left is.

    Parameters
    ----------
    selector : Selector
        Its ``transfer`` None stands for a quarter where KV has context shifts, and half where it has none.
    shifted : bool
        Whether KV has context shifts.
    """
    if not isinstance(selector, TransferringSelector):
        return 0.0
    return _TRANSFERRED[shifted] if selector.transfer is None else selector.transfer


@runtime_checkable
class ScoringSelector(Selector, Protocol):
    """A selector that gives every chunk token a score.

    Selectors whose view compares KV in the first layers have to: the tokens that score best go on to the next layer.
    """

    def score(self, probe: Probe) -> Tensor:
        """Return float32 ``[C]``, higher for tokens to be recomputed, from what is known so far."""


def required(part: Tensor | None, what: str, selector_name: str) -> Tensor:
    """Return a part of a probe that a selector cannot do without.

    Parameters
    ----------
    part : Tensor or None
    what : str
        What it is, in the plural, for the message.
    selector_name : str

    Raises
    ------
    FusedKVError
        If the probe has none: the caller did not honour the selector's view.
    """
    if part is None:
        raise FusedKVError(f"The selector {selector_name!r} needs {what}, but the probe has none.")
    return part


def checked_selection(selector: Selector, probe: Probe, budget: int) -> Tensor:
    """Return what a selector picks.

    Parameters
    ----------
    selector : Selector
    probe : Probe
    budget : int
        Tokens it may pick.

    Returns
    -------
    Tensor
        int64 ``[<= budget]``, ascending, all in ``probe.positions``.

    Raises
    ------
    ConfigError
        If it picks anything else: positions outside the chunks would corrupt the prompt's KV.
    """
    selected = selector.select(probe, budget)
    valid = (
        isinstance(selected, Tensor)
        and selected.dtype == torch.int64
        and selected.dim() == 1
        and selected.shape[0] <= budget
        and bool((selected.diff() > 0).all())
        and bool(torch.isin(selected, probe.positions).all())
    )
    if not valid:
        shown = f"{selected.dtype} {tuple(selected.shape)}" if isinstance(selected, Tensor) else repr(selected)[:60]
        raise ConfigError(
            f"The selector {selector.name!r} returned {shown}: it must return at most {budget} int64 positions, "
            "ascending, without duplicates, all of them in probe.positions."
        )
    return selected
