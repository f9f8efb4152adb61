"""One prompt answered in several ways, beside other requests, and each way compared with full prefill."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from fused_kv_llm.config import RecomputeRatio
from fused_kv_llm.decoding import Constraint
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import RequestCancelledError
from fused_kv_llm.online import Generation
from fused_kv_llm.prompt import Prompt
from fused_kv_llm.report import FusionReport
from fused_kv_llm.serving import RequestHandle

__all__ = ["ComparedAnswer", "SideBySide", "Way"]

_FULL = 1.0


@dataclass(frozen=True, slots=True)
class Way:
    """A way of answering.

    Parameters
    ----------
    selector : str or None
        None takes the engine's.
    recompute_ratio : float, "auto", "adaptive" or None
        1 is full prefill; None takes the engine's.
    """

    selector: str | None = None
    recompute_ratio: RecomputeRatio | None = None


@dataclass(frozen=True, slots=True)
class ComparedAnswer:
    """An answer, and how far it is from full prefill's.

    Parameters
    ----------
    text : str
    token_ids : list of int
        Chosen greedily.
    ttft_s : float
        Seconds to the first token: the lesser of two, taken in turn with the other ways and after a first time.
    report : FusionReport
        Of one of them.
    kl : float
        Mean over the tokens of full prefill's answer of the divergence D(full || this), in nats.
    agreement : float
        Share of these tokens that this way would have chosen too.
    first_difference : int or None
        The first token, from 0, in which the two answers differ; None if they are equal.
    """

    text: str
    token_ids: list[int]
    ttft_s: float
    report: FusionReport
    kl: float
    agreement: float
    first_difference: int | None


class SideBySide:
    """Answers one prompt in several ways.

    All are ordinary requests, batched with those of others, but nothing that earlier requests have left is used: only
    the header and stored chunks are.

    Parameters
    ----------
    engine : FusedKVEngine
    prompt : str, list of messages, ChatPrompt or RawPrompt
    max_tokens : int
        Of each answer.
    timeout_s : float or None
        Seconds after which one of them is given up.

    Attributes
    ----------
    tokens : int
        Of the prompts and answers so far; each way is answered three times.
    """

    def __init__(self, engine: FusedKVEngine, prompt: Prompt, max_tokens: int, timeout_s: float | None = None) -> None:
        self._engine, self._prompt, self._max_tokens, self._timeout_s = engine, prompt, max_tokens, timeout_s
        self.tokens = 0
        self._lock, self._is_cancelled = threading.Lock(), False
        self._handle: RequestHandle | None = None

    def compare(self, ways: Sequence[Way]) -> tuple[ComparedAnswer, list[ComparedAnswer]]:
        """Answer the prompt in all ways.

        Parameters
        ----------
        ways : sequence of Way

        Returns
        -------
        ComparedAnswer
            Full prefill's.
        list of ComparedAnswer
            Of each way; one with a ratio of 1 is full prefill's.

        Raises
        ------
        FusedKVError
            What :meth:`.FusedKVEngine.submit` raises, before anything is computed if a way cannot be had;
            ``RequestCancelledError`` after :meth:`cancel`.
        """
        for way in ways:
            self._engine.check_recipe(recompute_ratio=way.recompute_ratio, selector=way.selector)
        others, full = [way for way in ways if way.recompute_ratio != _FULL], _Full()
        everything = [Way(recompute_ratio=_FULL), *others]
        self._answer(everything[0], full)
        # Following full prefill's answer is the first time of each way, which is not timed.
        followers = [self._followed(way, full) for way in others]
        answers = [self._answer(way) for way in everything]
        again_s = [self._answer(way, max_tokens=1).report.ttft_s for way in everything]
        want = full.chosen
        found = map(_compared, answers, again_s, [want] * len(everything), [None, *followers])
        first, *rest = found
        left = iter(rest)
        return first, [first if way.recompute_ratio == _FULL else next(left) for way in ways]

    def full_prefill(self) -> FusionReport:
        """Answer with one token by full prefill, and return its report; raises as :meth:`compare`."""
        return self._answer(Way(recompute_ratio=_FULL), max_tokens=1).report

    def cancel(self) -> None:
        """End what is going on; any thread may call it."""
        with self._lock:
            self._is_cancelled, handle = True, self._handle
        if handle is not None:
            handle.cancel()

    def _followed(self, way: Way, full: _Full) -> _Follower:
        follower = _Follower(full)
        self._answer(way, follower, max_tokens=len(follower.want))
        return follower

    def _answer(self, way: Way, constraint: Constraint | None = None, max_tokens: int | None = None) -> Generation:
        with self._lock:
            if self._is_cancelled:
                raise RequestCancelledError("The comparison was cancelled")
            self._handle = handle = self._engine.submit(
                self._prompt,
                max_tokens=max_tokens or self._max_tokens,
                recompute_ratio=way.recompute_ratio,
                selector=way.selector,
                constraint=constraint,
                prefix_cache=False,
                timeout_s=self._timeout_s,
            )
        answer = handle.result()
        self.tokens += answer.report.prompt_tokens + answer.report.completion_tokens
        return answer


class _Full:
    """Keeps the distributions of full prefill's answer."""

    def __init__(self) -> None:
        self.rows = list[Tensor]()

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        # A step that is tried again comes with the same tokens.
        del self.rows[len(token_ids) :]
        self.rows.append(logits.float().log_softmax(-1).cpu())
        return logits

    @property
    def chosen(self) -> list[int]:
        """The likeliest tokens, the answer."""
        return [int(row.argmax()) for row in self.rows]


class _Follower:
    """Has an answer follow full prefill's, and notes at every token how far it would have been from it."""

    def __init__(self, full: _Full) -> None:
        self._full, self.want = full, full.chosen
        self.kl, self.chosen = list[float](), list[int]()

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        number = len(token_ids)
        got, want = logits.float().log_softmax(-1).cpu(), self._full.rows[number]
        self.kl = [*self.kl[:number], max(0.0, float((want.exp() * (want - got).nan_to_num(0.0)).sum()))]
        self.chosen = [*self.chosen[:number], int(got.argmax())]
        only = torch.full_like(logits, -torch.inf)
        only[self.want[number]] = 0.0
        return only


def _compared(
    answer: Generation, again_s: float, want: Sequence[int], follower: _Follower | None = None
) -> ComparedAnswer:
    got = answer.token_ids
    differs = (number for number, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1])
    return ComparedAnswer(
        answer.text,
        got,
        min(answer.report.ttft_s, again_s),
        answer.report,
        0.0 if follower is None else fmean(follower.kl),
        1.0 if follower is None else fmean(float(a == b) for a, b in zip(follower.chosen, want, strict=True)),
        next(differs, None if len(got) == len(want) else min(len(got), len(want))),
    )
