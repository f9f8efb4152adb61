"""The second step of a selection: the rest of a budget is chosen once a first share of it is recomputed.

Anchors choose the first share before the chunks' KV is read. Recomputing it reads all of that, layer by layer. So the
question can see the chunks themselves then, and what was recomputed, when the rest is chosen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fused_kv_llm.selectors import Selector, TwoStepSelector, View

from .context import Recipe
from .request import Request

__all__ = ["SecondStep", "first_budget"]


def first_budget(recipe: Recipe, view: View, budget: int) -> int:
    """Return how many tokens a recipe's selector chooses in its first step: all, unless it chooses in two.

    Parameters
    ----------
    recipe : Recipe
    view : View
        What its selector sees; only anchors leave something to read.
    budget : int
        All tokens that it may choose.
    """
    if not isinstance(recipe.selector, TwoStepSelector) or view.anchors is None or recipe.adaptive is not None:
        return budget
    return math.ceil(recipe.selector.first_share * budget)


class SecondStep:
    """Divides a request's rows into those of the first step and those of the second.

    Parameters
    ----------
    request : Request
    selector : TwoStepSelector

    Attributes
    ----------
    selector : Selector
        What chooses in the second step.
    is_due : bool
        Whether the first step has its rows and the second one has none yet.
    """

    def __init__(self, request: Request, selector: TwoStepSelector) -> None:
        self._end = int(request.chunk_positions[-1])
        self._first: Tensor | None = None
        self.selector: Selector = selector.second_step()
        self.is_due = False

    def rows(self, all_rows: Tensor) -> Tensor:
        """Return those of a request's rows, int64 ``[R]``, ascending, that a step computes; asked once in each step.

        Rows behind the last chunk, the question's among them, are of the second step. It computes no row of the first
        one again: what these have taught about their chunks is in the KV already.
        """
        if self._first is None:
            self._first, self.is_due = all_rows[all_rows <= self._end], True
            return self._first
        self.is_due = False
        return all_rows[~torch.isin(all_rows, self._first)]
