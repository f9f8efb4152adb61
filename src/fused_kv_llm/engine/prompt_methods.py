"""What an engine does with prompts: answer them, at once, token by token or while a search goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fused_kv_llm.chunk import chunk_texts
from fused_kv_llm.config import GenerationConfig, RecomputeRatio, check_seed
from fused_kv_llm.decoding import Constraint
from fused_kv_llm.errors import PromptError
from fused_kv_llm.online import FusedPrompt, Generation
from fused_kv_llm.prompt import Prompt
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import Selector
from fused_kv_llm.serving import PieceStream, RequestHandle, Terms

from .speculation import Speculation
from .state import EngineState

__all__ = ["PromptMethods"]


class PromptMethods(EngineState):
    """The methods of an engine that take prompts."""

    def prefill(
        self,
        prompt: Prompt,
        *,
        recompute_ratio: RecomputeRatio | None = None,
        selector: str | Selector | None = None,
        max_tokens: int = 1,
        seed: int = 0,
        report: FusionReport | None = None,
    ) -> tuple[FusedPrompt, FusionReport]:
        """Do everything up to the first token's logits.

        Parameters
        ----------
        prompt : str or list of messages
        recompute_ratio, selector
            Override the engine's for this call.
        max_tokens : int
            Room to reserve for the answer.
        seed : int
            For selectors that draw.
        report : FusionReport or None
            A report to fill.

        Returns
        -------
        FusedPrompt, FusionReport

        Raises
        ------
        PromptError, PromptTooLongError
            If the prompt is empty or does not fit.
        ConfigError
            If the ratio or the selector cannot be used.
        """
        report = FusionReport() if report is None else report
        recipe = self._recipe(recompute_ratio, selector, check_seed(seed))
        report.warnings += self._calibration_warnings(recompute_ratio)
        return self.requests.prefill(prompt, recipe, max_tokens, report), report

    def submit(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] | str | None = (),
        seed: int | None = None,
        logprobs: int | None = None,
        recompute_ratio: RecomputeRatio | None = None,
        selector: str | Selector | None = None,
        constraint: Constraint | None = None,
        prefix_cache: bool = True,
        trace_scores: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
        expected: Sequence[str] = (),
    ) -> RequestHandle:
        """Have a prompt answered beside others, and return at once.

        Requests of all threads and engines of a model are computed together, step by step; none changes the answer of
        another.

        Parameters
        ----------
        prompt : str, list of messages, ChatPrompt or RawPrompt
            A string becomes one user message of the chat template, unless the engine was made with
            ``wrap_chat_template=False``; messages are rendered as they are, and a raw prompt is not.
        max_tokens, temperature, top_p, stop, seed, logprobs
            See :class:`~fused_kv_llm.config.GenerationConfig`. `max_tokens` is cut to what the context leaves.
        recompute_ratio, selector
            Override the engine's for this call.
        constraint : callable or None
            Called before every choice with the answer's token ids so far and the logits ``[vocabulary]``;
            returns the logits to choose from, for instance with all but the tokens of a grammar at -inf. It is called
            by the thread that computes for all requests, so it should be quick.
        prefix_cache : bool
            Whether KV that earlier requests have left is used, and some is left to later ones. Without it two requests
            with one prompt take the same time.
        trace_scores : bool
            Whether ``report.trace.selection`` has the scores by which chunk tokens were chosen, layer by layer.
        priority : int
            Requests of a higher priority come first.
        timeout_s : float or None
            Seconds after which the request is given up with ``DeadlineError``.
        expected : sequence of str
            Chunks that the prompt should contain, such as those that a search has returned: the report's ``verdicts``
            say of each whether it was reused, and why not. The caller's thread finds that out, after the answer.

        Returns
        -------
        RequestHandle
            Its ``pieces()``, ``result()`` and their asynchronous likes raise what ends the request.

        Raises
        ------
        ConfigError
            If an option cannot work.
        CorpusError
            If one string was expected instead of several, or something that is not text.
        QueueFullError
            If more requests wait than ``max_queued``.
        EngineClosedError
            If the engine was closed.
        """
        config = GenerationConfig.create(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop, seed=seed, logprobs=logprobs
        )
        recipe = self._recipe(recompute_ratio, selector, config.seed or 0)
        recipe = replace(recipe, prefix_cache=prefix_cache, trace_scores=trace_scores)
        warned = self._calibration_warnings(recompute_ratio)
        terms = Terms(priority, timeout_s, tuple(chunk_texts(expected)), warned)
        return self.requests.submit(prompt, recipe, config, constraint, terms)

    def speculate(
        self,
        *,
        max_tokens: int = 256,
        seed: int | None = None,
        recompute_ratio: RecomputeRatio | None = None,
        selector: str | Selector | None = None,
        **ignored: Any,
    ) -> Speculation:
        """Begin to propose prompts while a search goes on, see :class:`.Speculation`.

        A proposal is loaded and computed up to its first token while nobody else is answered. Once the search has ended
        (:meth:`.Speculation.finish`), :meth:`submit` and all that go through it take up the proposal if they are called
        with the same prompt. Nothing of a proposal is seen before, and nothing of a wrong one ever.

        Parameters
        ----------
        max_tokens : int
            No answer to be longer than that.
        seed, recompute_ratio, selector
            As they will be given to :meth:`submit`.
        **ignored
            Its other options, which may be others then.

        Returns
        -------
        Speculation
            A context manager.

        Raises
        ------
        ConfigError
            If an option cannot work.

        Examples
        --------
        >>> import tempfile
        >>> from fused_kv_llm import FusedKVEngine
        >>> engine = FusedKVEngine("smollm2-135m", kv_dir=tempfile.mkdtemp())
        >>> with engine.speculate(max_tokens=4) as speculation:
        ...     under_way = speculation.propose("What is a ferry?")
        ...     speculation.finish("What is a ferry?")
        >>> engine.generate("What is a ferry?", max_tokens=4).report.speculation
        'confirmed'
        """
        config = GenerationConfig.create(max_tokens=max_tokens, seed=seed)
        recipe = self._recipe(recompute_ratio, selector, config.seed or 0)
        return Speculation(self.requests.speculations, recipe, config)

    def submit_staged(self, prompts: Iterable[Prompt], **options: Any) -> RequestHandle:
        """Have the last one of several prompts answered, and those before it computed until the next one comes.

        Parameters
        ----------
        prompts : iterable of str or list of messages
            What would be asked if a search ended after each of its stages; made in the caller's thread.
        **options
            Those of :meth:`submit`.

        Returns
        -------
        RequestHandle
            Of the last prompt.

        Raises
        ------
        PromptError
            If there is no prompt.
        """
        with self.speculate(**options) as speculation:
            last: list[Prompt] = []
            for prompt in prompts:
                # The last one too: nobody knows that it is, until the stages end.
                speculation.propose(prompt)
                last = [prompt]
            if not last:
                raise PromptError("There is no prompt to answer: the stages ended before the first one.")
            speculation.finish(last[0])
        return self.submit(last[0], **options)

    @property
    def is_busy(self) -> bool:
        """Whether requests are being answered or wait, so that nothing is done on suspicion."""
        return self.requests.is_busy

    def stream(self, prompt: Prompt, **options: Any) -> PieceStream:
        """Answer a prompt, token by token; closing or dropping the stream gives its memory back.

        Parameters
        ----------
        prompt : str or list of messages
        **options
            Those of :meth:`submit`.

        Returns
        -------
        PieceStream
            Of pieces, the last one with the finish reason and the report. The first one is there.
        """
        handle = self.submit(prompt, **options)
        handle.wait_for_first()
        return PieceStream(handle)

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Answer a prompt; the options are those of :meth:`submit`."""
        return self.submit(prompt, **options).result()

    def token_ids(self, text: str) -> list[int]:
        """Return a text's ids, special-token text read as ordinary text."""
        return self.renderer.encode_chunk(text)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids the model sees for a prompt: rendered and tokenised once, whole."""
        return list(self.renderer.encode(self.renderer.render(prompt)).ids)
