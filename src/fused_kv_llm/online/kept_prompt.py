"""What a request leaves to later ones: under which recipe its KV is kept, and which of it holds for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from itertools import takewhile

from fused_kv_llm.kv import PlacedChunk, PrefixRun
from fused_kv_llm.model import LoadedModel
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import FirstLayersView, Selector, View, variant_selector

from .adaptive import Adaptive
from .context import Recipe
from .selection import view_of

__all__ = ["FusedRecipe", "KeptPrompt", "fused_recipe", "fused_runs"]


@dataclass(frozen=True, slots=True)
class FusedRecipe:
    """Everything that fused KV depends on besides the model, the store and the tokens; equal ones are interchangeable.

    Parameters
    ----------
    ratio : float
    selector : Selector
        A frozen dataclass: its parameters are compared.
    kind : type
        The selector's class.
    seed : int
    view : View or FirstLayersView
        What the selector sees of this model, its critical layers filled in.
    shift_name : str or None
        The context shifts that are added.
    adaptive : Adaptive or None
        Until when more is recomputed, round by round.
    """

    ratio: float
    selector: Selector
    kind: type
    seed: int
    view: View | FirstLayersView
    shift_name: str | None
    adaptive: Adaptive | None = None


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """What may be kept of a prompt's KV.

    Parameters
    ----------
    ids : list of int
        The prompt's tokens.
    runs : list of PrefixRun
        How they came by their KV, as far as it may be kept.
    since : int or None
        The tree's version when the prompt was planned; None if it is not to be kept.
    """

    ids: list[int]
    runs: list[PrefixRun]
    since: int | None

    def common_with(self, ids: Sequence[int]) -> KeptPrompt:
        """Return the part for the tokens that another prompt begins with too, see :meth:`up_to`."""
        same = next((at for at, (one, other) in enumerate(zip(self.ids, ids, strict=False)) if one != other), None)
        return self.up_to(min(len(self.ids), len(ids)) if same is None else same)

    def up_to(self, count: int) -> KeptPrompt:
        """Return the part for the first `count` tokens, without runs that hold only as a whole and go on."""
        # Up to the first run that cannot be parted: those behind it would begin with its tokens.
        whole = takewhile(lambda run: not run.whole or run.stop <= count, self.runs)
        return KeptPrompt(self.ids[:count], [PrefixRun(min(run.stop, count), *run[1:]) for run in whole], self.since)

    def with_answer(self, answer_ids: Sequence[int]) -> KeptPrompt:
        """Return the same with tokens of the answer, which continues whatever the prompt ended with."""
        ids = [*self.ids, *answer_ids]
        if not self.runs or self.runs[-1].stop < len(self.ids):
            return self
        return KeptPrompt(ids, [*self.runs, PrefixRun(len(ids), self.runs[-1].recipe)], self.since)


def fused_recipe(recipe: Recipe, loaded: LoadedModel, shift_name: str | None) -> FusedRecipe | None:
    """Return the key under which fused KV of a recipe is kept and looked up.

    Returns
    -------
    FusedRecipe or None
        None at ratio 1, where nothing is fused; for a selector that is no frozen dataclass, which may choose otherwise
        the next time; and for one that takes variants of chunks, of which there may be others then.
    """
    selector = recipe.selector
    params = getattr(type(selector), "__dataclass_params__", None)
    if recipe.ratio >= 1 or not is_dataclass(selector) or params is None or not params.frozen:
        return None
    if variant_selector(selector) is not None:
        return None
    try:
        hash(selector)
    except TypeError:
        return None
    view = view_of(selector, loaded, shift_name, FusionReport())
    return FusedRecipe(recipe.ratio, selector, type(selector), recipe.seed, view, shift_name, recipe.adaptive)


def fused_runs(
    known: Sequence[PrefixRun], chunks: Sequence[PlacedChunk], num_tokens: int, recipe: FusedRecipe | None
) -> list[PrefixRun]:
    """Return how a prompt's tokens came by their KV.

    Parameters
    ----------
    known : sequence of PrefixRun
        Those of the prefix that was at hand.
    chunks : sequence of PlacedChunk
        Whose KV was reused, in prompt order; none if all tokens were computed.
    num_tokens : int
        Tokens of the prompt.
    recipe : FusedRecipe or None
        Under what fused KV is kept; None keeps what stands before it.

    Returns
    -------
    list of PrefixRun
        Up to `num_tokens`, or as far as may be kept.
    """
    before = known[-1].recipe if known else None
    if not chunks:
        return [*known, PrefixRun(num_tokens, before)]
    runs = [*known, PrefixRun(chunks[0].segment.start, before)]
    if recipe is None:
        return runs
    if recipe.ratio > 0:
        # With another question, or other chunks beside them, other tokens would have been recomputed.
        return [*runs, PrefixRun(num_tokens, recipe, whole=True)]
    return [*runs, *(PrefixRun(chunk.segment.stop, recipe, whole=True) for chunk in chunks),
            PrefixRun(num_tokens, recipe)]  # fmt: skip
