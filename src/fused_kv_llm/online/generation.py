"""Decoding: from a fused prompt to text."""

from __future__ import annotations

import inspect
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from fused_kv_llm.config import GenerationConfig
from fused_kv_llm.decoding import Constraint, TextStream, TokenSampler, end_token_ids
from fused_kv_llm.model import LoadedModel, ModelLock
from fused_kv_llm.report import FusionReport

from .fusion import FusedPrompt

__all__ = ["FinishReason", "Generation", "Piece", "PieceStream", "decode"]

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
    """

    text: str
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    report: FusionReport | None = None


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
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    report: FusionReport


class PieceStream(Generator[Piece]):
    """An answer as it streams, and what it holds until then.

    A generator frees what it holds in a ``finally`` only if it was started; a stream does so also if no piece was ever
    asked for: when it ends, when it is closed, and when nobody refers to it any more.

    Parameters
    ----------
    pieces : generator of Piece
    resources : ExitStack
        Closed at the end.
    """

    def __init__(self, pieces: Generator[Piece], resources: ExitStack) -> None:
        self._pieces = pieces
        self._resources = resources

    def send(self, value: None) -> Piece:
        """Return the next piece; the same as ``next``."""
        try:
            return self._pieces.send(value)
        except BaseException:
            self._end()
            raise

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        error: BaseException | object = None,
        trace: TracebackType | None = None,
        /,
    ) -> Piece:
        """Raise an error where the answer stands, which ends it."""
        try:
            return self._pieces.throw(kind if isinstance(kind, BaseException) else kind())
        finally:
            self._end()

    def __del__(self) -> None:
        """Close the stream."""
        self.close()

    def _end(self) -> None:
        # Nobody can interrupt a thread that is in the middle of a piece: the stream goes on then.
        if inspect.getgeneratorstate(self._pieces) != inspect.GEN_RUNNING:
            self._resources.close()


def decode(
    loaded: LoadedModel,
    prompt: FusedPrompt,
    config: GenerationConfig,
    report: FusionReport,
    started_s: float,
    lock: ModelLock,
    constraint: Constraint | None = None,
) -> Generator[Piece]:
    """Generate token by token.

    Parameters
    ----------
    loaded : LoadedModel
    prompt : FusedPrompt
        Its cache has room for ``config.max_tokens``.
    config : GenerationConfig
    report : FusionReport
        Gets the time to the first token and the number of tokens.
    started_s : float
        ``time.perf_counter()`` when the request came.
    lock : ModelLock
        Held during a forward only, never while a piece is out: a slow reader blocks nobody.
    constraint : callable or None
        Maps the answer's token ids so far and the logits ``[vocabulary]`` to the logits to choose from.

    Yields
    ------
    Piece
        The last one has a finish reason and the report.
    """
    sampler = TokenSampler(config, loaded.device)
    stream = TextStream(loaded.tokenizer, config.stop)
    ends = end_token_ids(loaded)
    logits = prompt.logits
    chosen: list[int] = []
    for count in range(1, config.max_tokens + 1):
        token = sampler.choose(logits if constraint is None else constraint(chosen, logits))
        chosen.append(token)
        if count == 1:
            report.ttft_s = time.perf_counter() - started_s
            report.seconds["first_token"] = report.ttft_s
        report.completion_tokens = count
        if token in ends:
            yield Piece(stream.flush(), token, "stop", report)
            return
        text = stream.push(token)
        if stream.stopped:
            yield Piece(text, token, "stop", report)
            return
        if count == config.max_tokens:
            break
        yield Piece(text, token)
        with lock:
            logits = prompt.append(loaded, [token])[-1]
    yield Piece(text + stream.flush(), token, "length", report)
