"""Decoding: from logits to the pieces of an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from torch import Tensor

from fused_kv_llm.config import GenerationConfig
from fused_kv_llm.decoding import Constraint, TextStream, TokenLogprobs, TokenSampler, end_token_ids, token_logprobs
from fused_kv_llm.model import LoadedModel
from fused_kv_llm.report import FusionReport

__all__ = ["AnswerWriter", "FinishReason", "Generation", "Piece"]

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer as it streams.

    Parameters
    ----------
    text : str
        May be empty.
    token_id : int or None
        The token that brought it.
    finish_reason : {"stop", "length"} or None
        Set on the last piece only.
    report : FusionReport or None
        Set on the last piece only.
    logprobs : TokenLogprobs or None
        Of the token, if they were asked for.
    """

    text: str
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    report: FusionReport | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer.

    Parameters
    ----------
    text : str
        Without the prompt and without stop strings.
    token_ids : list of int
        All generated tokens, the end token included.
    finish_reason : {"stop", "length"}
    report : FusionReport
    logprobs : list of TokenLogprobs
        One for each token, if they were asked for; otherwise empty.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    report: FusionReport
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Self:
        """Return the answer whose pieces these are."""
        last = pieces[-1]
        return cls(
            text="".join(piece.text for piece in pieces),
            token_ids=[piece.token_id for piece in pieces if piece.token_id is not None],
            finish_reason=last.finish_reason or "length",
            report=last.report or FusionReport(),
            logprobs=[piece.logprobs for piece in pieces if piece.logprobs is not None],
        )


class AnswerWriter:
    """Chooses the tokens of one answer, and makes text of them.

    Parameters
    ----------
    loaded : LoadedModel
    config : GenerationConfig
    report : FusionReport
        Gets the number of tokens, the time to the first one, the time for each further one and for all of them.
    started_s : float
        ``time.perf_counter()`` when the request came.
    constraint : callable or None
        Maps the answer's token ids so far and the logits ``[vocabulary]`` to the logits to choose from.

    Attributes
    ----------
    token_ids : list of int
        Chosen so far.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: GenerationConfig,
        report: FusionReport,
        started_s: float,
        constraint: Constraint | None = None,
    ) -> None:
        self._sampler = TokenSampler(config, loaded.device)
        self._stream = TextStream(loaded.tokenizer, config.stop)
        self._ends = end_token_ids(loaded)
        self._most, self._logprobs = config.max_tokens, config.logprobs
        self._report, self._started_s, self._constraint = report, started_s, constraint
        self._first_token_s = 0.0
        self.token_ids: list[int] = []

    def write(self, logits: Tensor) -> Piece:
        """Choose the next token.

        Parameters
        ----------
        logits : Tensor
            float32 ``[vocabulary]``.

        Returns
        -------
        Piece
            With a finish reason and the report if it is the last one.
        """
        piece, now_s = self._next(logits), time.perf_counter()
        report, count = self._report, len(self.token_ids)
        report.completion_tokens = count
        if count == 1:
            self._first_token_s = now_s
            report.ttft_s = report.seconds["first_token"] = now_s - self._started_s
        else:
            report.seconds["step"] = (now_s - self._first_token_s) / (count - 1)
        if piece.finish_reason is not None:
            report.spend("decode", self._first_token_s, now_s)
        return piece

    def _next(self, logits: Tensor) -> Piece:
        chosen, report = self.token_ids, self._report
        token = self._sampler.choose(logits if self._constraint is None else self._constraint(chosen, logits))
        chosen.append(token)
        logprobs = None if self._logprobs is None else token_logprobs(logits, token, self._logprobs)
        if token in self._ends:
            return Piece(self._stream.flush(), token, "stop", report, logprobs)
        text = self._stream.push(token)
        if self._stream.stopped:
            return Piece(text, token, "stop", report, logprobs)
        if len(chosen) == self._most:
            return Piece(text + self._stream.flush(), token, "length", report, logprobs)
        return Piece(text, token, logprobs=logprobs)
