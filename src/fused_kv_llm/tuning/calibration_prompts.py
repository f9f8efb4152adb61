"""The prompts of a calibration: questions over a store's own chunks, and what each way would answer."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

import torch

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import ConfigError, CorpusError
from fused_kv_llm.offline import questions_from_chunks, retriever_of
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import Selector

from .written_questions import MadeQuestions, made_questions

__all__ = ["CalibrationPrompts", "agreement", "leaving_nothing"]

FRAME = "Answer the question from the context.\n\nContext:\n{}\n\nQuestion: {}\nAnswer briefly."


class CalibrationPrompts:
    """Questions over a store's chunks, what full prefill answers, and what other ways would choose along that answer.

    Only chunks of the engine's own model and tenant are asked about and stand in prompts.

    Parameters
    ----------
    engine : FusedKVEngine
    questions : sequence of str or None
        None makes them from the chunks.
    num_questions : int
        Questions to make.
    num_chunks, answer_tokens : int
        Chunks in a prompt, and tokens of an answer that are compared.
    written : bool
        Whether the model writes the questions that are made; otherwise sentences of the chunks are quoted.

    Attributes
    ----------
    chunks : list of str
        All that are stored.
    asked : list of (str, str)
        The questions, each with the chunk that it was made from, or an empty text.
    made : MadeQuestions or None
        How they came about; None where they were given.

    Raises
    ------
    CorpusError
        If the store holds nothing of this model to ask about.
    ConfigError
        If a count is none.
    """

    def __init__(
        self,
        engine: FusedKVEngine,
        questions: Sequence[str] | None,
        num_questions: int,
        num_chunks: int,
        answer_tokens: int,
        *,
        written: bool = True,
    ) -> None:
        counts = {"num_questions": num_questions, "num_chunks": num_chunks, "answer_tokens": answer_tokens}
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"{name}={count!r} is not a whole number of at least 1")
        self.chunks = engine.stored_texts()
        if not self.chunks:
            raise CorpusError("The store holds no chunk of this model: ingest the corpus before calibrating.")
        self._engine, self._num_chunks, self._answer_tokens = engine, num_chunks, answer_tokens
        tenant, embedder = engine.config.tenant, engine.config.embedder
        self._retrieve = retriever_of(self.chunks, engine.store.kv_dir, embedder=embedder, tenant=tenant)
        self.made: MadeQuestions | None = None
        if questions is not None:
            self.asked = [(question, "") for question in questions]
            return
        if written:
            self.made = made_questions(engine, self.chunks, num_questions, self._retrieve)
        else:
            self.made = MadeQuestions(questions_from_chunks(self.chunks, num_questions))
        self.asked = self.made.asked
        if not self.asked:
            raise CorpusError("The chunks have no sentence long enough to make a question from: give questions.")

    @property
    def description(self) -> str:
        """Where the questions come from."""
        return "given" if self.made is None else self.made.description

    def answered(self, question: str, source: str) -> tuple[str, list[int]]:
        """Return the prompt of a question, and the tokens that full prefill answers greedily."""
        count = self._num_chunks
        context = list(dict.fromkeys([*([source] if source else []), *self._retrieve(question, count)]))[:count]
        random.Random(question).shuffle(context)
        prompt = FRAME.format("\n\n".join(context), question)
        full = self._engine.generate(prompt, max_tokens=self._answer_tokens, recompute_ratio=1.0)
        return prompt, list(full.token_ids)

    def choices(
        self, prompt: str, answer: Sequence[int], ratio: float, selector: str | Selector
    ) -> tuple[list[int], FusionReport, float]:
        """Return what would be chosen at every token of the answer, the report, and the seconds to the first."""
        engine, started = self._engine, time.perf_counter()
        fused, report = engine.prefill(prompt, recompute_ratio=ratio, selector=selector, max_tokens=len(answer) + 1)
        seconds = time.perf_counter() - started
        logits = fused.logits[None]
        if len(answer) > 1:
            logits = torch.cat((logits, fused.append(engine.loaded, list(answer[:-1]))))
        fused.cache.release()
        return logits.argmax(dim=-1).tolist(), report, seconds


def agreement(chosen: Sequence[int], answer: Sequence[int]) -> float:
    """Return the share of an answer's tokens that were chosen too."""
    return fmean(float(a == b) for a, b in zip(chosen, answer, strict=True))


@contextmanager
def leaving_nothing(engine: FusedKVEngine) -> Iterator[None]:
    """Have an engine keep no variants of chunks meanwhile, behind which the same prompts would cost nothing."""
    kept, engine.corpus.keeps_prompts = engine.corpus.keeps_prompts, False
    try:
        yield
    finally:
        engine.corpus.keeps_prompts = kept
