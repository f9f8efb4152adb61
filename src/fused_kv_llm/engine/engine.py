"""``FusedKVEngine``, the face of the library: one model over one store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, get_args, overload

from fused_kv_llm.chunk import chunk_text
from fused_kv_llm.config import DEFAULT_MODEL, EngineConfig, GenerationConfig, check_ratio, check_seed
from fused_kv_llm.decoding import Constraint
from fused_kv_llm.errors import ConfigError, PromptError
from fused_kv_llm.offline import GivenNeighbours, Preprocess
from fused_kv_llm.online import FusedPrompt, Generation, Recipe, view_of
from fused_kv_llm.prompt import ChatPrompt
from fused_kv_llm.report import FusionReport, IngestReport
from fused_kv_llm.selectors import Selector, resolve_selector
from fused_kv_llm.serving import PieceStream, RequestHandle, Terms, limits_of

from .calibration import read_calibration
from .constructor import has_options, has_options_after_model, show_options
from .corpus import EngineCorpus, similarity_of
from .parts import open_parts
from .prefixes import open_prefixes
from .requests import Messages, RequestRunner
from .speculation import Speculation

__all__ = ["FusedKVEngine"]


class FusedKVEngine:
    """Answers prompts from precomputed chunk KV.

    Parameters
    ----------
    model : str, Path, transformers.PreTrainedModel or LoadedModel
        Alias ``"smollm2-135m"``, hub id, local folder, GGUF file, a model in memory, or the result of
        ``load_model``.
    **options
        The other fields of :class:`~fused_kv_llm.config.EngineConfig`, which describes them.

    Attributes
    ----------
    config : EngineConfig
        The options.
    loaded : LoadedModel
    store : KVStore
    renderer : PromptRenderer
    identity : str
        Digest of everything besides its token ids on which a chunk's KV depends.
    model_lock : ModelLock
        Held during every forward; hold it to run the model yourself. Engines that share a model share it.
    corpus : EngineCorpus
        What is done with chunks outside of requests.
    requests : RequestRunner
        What is done with prompts.
    recompute_ratio : float
        The ratio of calls that name none.

    Raises
    ------
    ConfigError
        If an option cannot work.
    ModelNotFoundError, UnsupportedModelError
        If the model cannot be loaded or its KV cannot be moved.
    ModelChangedError
        If it does not compute what its stored KV was computed with.
    StoreUnavailableError
        If the folder cannot be used.
    """

    @overload
    @has_options(EngineConfig)
    def __init__(self) -> None: ...

    @overload
    @has_options_after_model(EngineConfig)
    def __init__(self, model: Any) -> None: ...

    @show_options
    def __init__(self, model: Any = DEFAULT_MODEL, **options: Any) -> None:
        self.config = config = EngineConfig(model=model, **options)
        # Wrong options are refused before the model is loaded, which takes long.
        similarity = similarity_of(config)
        resolve_selector(config.selector)
        parts = open_parts(config)
        self.loaded, self.store, self.renderer = parts.loaded, parts.store, parts.renderer
        self.identity, self.model_lock = parts.identity, parts.model_lock
        self._parts = parts
        try:
            # First, since it may be refused: the corpus opens a file of its own.
            self.recompute_ratio, self._selector = self._chosen(config.recompute_ratio, config.selector)
            self.corpus = EngineCorpus(
                parts,
                similarity,
                store_misses=config.store_misses,
                variants=config.variants,
                variant_bytes=config.variant_bytes,
            )
            limits = limits_of(config, parts.loaded.device)
            prefixes = open_prefixes(config.policy, limits, parts.loaded.device, self.corpus.cost)
            self.requests = RequestRunner(parts, self.corpus, limits, prefixes, config.tenant)
        except BaseException:
            self.store.close()
            raise

    def _chosen(self, ratio: float | Literal["auto"] | None, selector: str | Selector | None) -> tuple[float, Selector]:
        """Return the ratio and the selector of a call; a calibration gives both."""
        if ratio == "auto":
            found = read_calibration(self.store.kv_dir, self.fusion_identity)
            return found.recompute_ratio, resolve_selector(found.selector)
        return (
            self.recompute_ratio if ratio is None else check_ratio(ratio),
            self._selector if selector is None else resolve_selector(selector),
        )

    # -- chunks ----------------------------------------------------------------------------------------------

    def build_kv_cache(
        self,
        texts: Iterable[str],
        *,
        neighbours: GivenNeighbours | None = None,
        preprocess: Preprocess = "background",
        refresh: bool = False,
        variant_contexts: int = 0,
        progress: bool = True,
    ) -> IngestReport:
        """Prefill every chunk once and store its KV; resumes where an interrupted call stopped.

        Chunks can be asked about as soon as their KV is stored. With ``preprocessing="similar"`` a second, longer
        pass follows, which brings their KV closer to what it would be at a later place in a prompt.

        Parameters
        ----------
        texts : iterable of str
            One chunk each, as they will stand in prompts.
        neighbours : mapping, callable or None
            A caller's own graph, text to similar or linked texts, nearest first. It is remembered for these texts;
            one that it does not know has no neighbours. None asks the embedder, but for texts whose neighbours were
            given at an earlier call. Only used with ``preprocessing="similar"``.
        preprocess : {"background", "wait", "later"}
            When stored chunks that are not preprocessed yet, of this call or an earlier one, get it: in the
            background, beside requests; before this call returns; or not yet. The pass may be stopped at any
            time, by :meth:`close` or a kill, and goes on with the next call.
        refresh : bool
            Whether chunks whose neighbours have changed are preprocessed again. Otherwise they stay usable and
            are counted in ``chunks_stale``.
        variant_contexts : int
            Behind how many contexts of three similar chunks each chunk that is preprocessed is also kept as a variant,
            for engines with ``variants``. Each takes a prefill of all four, in the background or before this returns
            as `preprocess` says.
        progress : bool
            Whether to show progress: a bar for each pass, or lines where the output is no terminal. Work in the
            background shows none; see :meth:`wait_for_background`.

        Returns
        -------
        IngestReport

        Raises
        ------
        CorpusError
            If there is nothing to ingest, or one string was given instead of several.
        MissingExtraError
            If packages that find similar chunks are not installed.
        StoreFullError
            If the disk cannot hold the result.
        """
        if preprocess not in get_args(Preprocess):
            raise ConfigError(f"preprocess={preprocess!r} is unknown: use 'background', 'wait' or 'later'")
        if variant_contexts and (self.corpus.variants is None or self.config.preprocessing == "none"):
            raise ConfigError(
                f"variant_contexts={variant_contexts!r} keeps nothing: make the engine with variants=... and "
                'preprocessing="similar", whose contexts are used'
            )
        chunks = list(texts) if not isinstance(texts, str) else texts
        report = self.corpus.ingest(chunks, neighbours, progress=progress)
        self.build_anchors(chunks, progress=progress)
        self._preprocess(report, preprocess, refresh=refresh, progress=progress, contexts=variant_contexts)
        return report

    def preprocess(self, *, refresh: bool = False, progress: bool = True) -> IngestReport:
        """Preprocess all stored chunks that are not preprocessed yet, and return when it is done.

        This is the second pass of :meth:`build_kv_cache`, for a store that was filled before.

        Parameters
        ----------
        refresh : bool
            Whether chunks whose neighbours have changed are preprocessed again.
        progress : bool
            Whether to show progress.

        Returns
        -------
        IngestReport

        Raises
        ------
        MissingExtraError
            If packages that find similar chunks are not installed.
        StoreFullError
            If the disk cannot hold the result.
        """
        report = IngestReport()
        self._preprocess(report, "wait", refresh=refresh, progress=progress)
        return report

    def _preprocess(
        self, report: IngestReport, when: Preprocess, *, refresh: bool, progress: bool, contexts: int = 0
    ) -> None:
        try:
            self.corpus.preprocess(report, when, refresh=refresh, progress=progress, contexts=contexts)
        finally:
            if refresh:
                self.clear_prefix_cache()

    def build_anchors(
        self, texts: Iterable[str], *, selector: str | Selector | None = None, progress: bool = True
    ) -> int:
        """Store the anchors of chunks that are stored already, for selectors that probe with anchors (QCFuse).

        :meth:`build_kv_cache` does it when the engine's own selector needs them.

        Parameters
        ----------
        texts : iterable of str
        selector : str, Selector or None
            Whose anchors; None is the engine's. For one that needs none, nothing is done.
        progress : bool
            Whether to show a progress bar.

        Returns
        -------
        int
            Chunks whose anchors are new.
        """
        chosen = self._selector if selector is None else resolve_selector(selector)
        return self.corpus.build_anchors(texts, view_of(chosen, self.loaded, FusionReport()), progress=progress)

    def delete_chunks(self, texts: Iterable[str]) -> int:
        """Delete the stored KV of chunks that left the corpus; texts without KV are passed over.

        Parameters
        ----------
        texts : iterable of str

        Returns
        -------
        int
            How many chunks were stored.

        Raises
        ------
        CorpusError
            If one string was given instead of several.
        """
        try:
            return self.corpus.delete(texts)
        finally:
            self.clear_prefix_cache()

    def clear_prefix_cache(self) -> None:
        """Forget the KV of answered prompts; deleting chunks does it too, since prompts may have contained them."""
        self.requests.prefixes.clear()

    def prefetch(self, texts: Iterable[str]) -> list[str | None]:
        """Start loading the KV of retrieved chunks into memory, with the sidecars that the engine's selector reads.

        Parameters
        ----------
        texts : iterable of str
            Retrieved chunks. With `store_misses`, those without KV are ingested after the next request whose prompt
            contains them.

        Returns
        -------
        list of str or None
            Their keys; None where no KV is stored.

        Raises
        ------
        CorpusError
            If one string was given instead of several.
        """
        return self.corpus.prefetch(texts, view_of(self._selector, self.loaded, FusionReport()))

    def chunk_id(self, text: str) -> str | None:
        """Return the key of a chunk's stored KV, or None where none is stored."""
        return self.corpus.keys_of([chunk_text(text)])[0]

    def stored_texts(self) -> list[str]:
        """Return the text of every chunk whose KV is stored for this model, in the order of ingestion."""
        return self.corpus.stored_texts()

    def wait_for_background(self, *, progress: bool = False) -> None:
        """Return when no ingestion is under way in the background.

        Parameters
        ----------
        progress : bool
            Whether to show the progress of preprocessing.

        Raises
        ------
        FusedKVError
            What ended the preprocessing.
        """
        self.corpus.wait(progress=progress)

    # -- prompts ---------------------------------------------------------------------------------------------

    def prefill(
        self,
        prompt: str | Messages | ChatPrompt,
        *,
        recompute_ratio: float | Literal["auto"] | None = None,
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
        ratio, chosen = self._chosen(recompute_ratio, selector)
        report = FusionReport() if report is None else report
        recipe = Recipe(chosen, ratio, check_seed(seed))
        return self.requests.prefill(prompt, recipe, max_tokens, report), report

    def submit(
        self,
        prompt: str | Messages | ChatPrompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] | str | None = (),
        seed: int | None = None,
        recompute_ratio: float | Literal["auto"] | None = None,
        selector: str | Selector | None = None,
        constraint: Constraint | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> RequestHandle:
        """Have a prompt answered beside others, and return at once.

        Requests of all threads and engines of a model are computed together, step by step; none changes the answer of
        another.

        Parameters
        ----------
        prompt : str or list of messages
            A string becomes one user message of the chat template, unless the engine was made with
            ``wrap_chat_template=False``; messages are rendered as they are.
        max_tokens, temperature, top_p, stop, seed
            See :class:`~fused_kv_llm.config.GenerationConfig`. `max_tokens` is cut to what the context leaves.
        recompute_ratio, selector
            Override the engine's for this call.
        constraint : callable or None
            Called before every choice with the answer's token ids so far and the logits ``[vocabulary]``;
            returns the logits to choose from, for instance with all but the tokens of a grammar at -inf. It is called
            by the thread that computes for all requests, so it should be quick.
        priority : int
            Requests of a higher priority come first.
        timeout_s : float or None
            Seconds after which the request is given up with ``DeadlineError``.

        Returns
        -------
        RequestHandle
            Its ``pieces()``, ``result()`` and their asynchronous likes raise what ends the request.

        Raises
        ------
        ConfigError
            If an option cannot work.
        QueueFullError
            If more requests wait than ``max_queued``.
        EngineClosedError
            If the engine was closed.
        """
        config = GenerationConfig.create(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop, seed=seed
        )
        ratio, chosen = self._chosen(recompute_ratio, selector)
        recipe, terms = Recipe(chosen, ratio, config.seed or 0), Terms(priority, timeout_s)
        return self.requests.submit(prompt, recipe, config, constraint, terms)

    def speculate(
        self,
        *,
        max_tokens: int = 256,
        seed: int | None = None,
        recompute_ratio: float | Literal["auto"] | None = None,
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
        ratio, chosen = self._chosen(recompute_ratio, selector)
        return Speculation(self.requests.speculations, Recipe(chosen, ratio, config.seed or 0), config)

    def submit_staged(self, prompts: Iterable[str | Messages | ChatPrompt], **options: Any) -> RequestHandle:
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
            last: list[str | Messages | ChatPrompt] = []
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

    def stream(self, prompt: str | Messages | ChatPrompt, **options: Any) -> PieceStream:
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

    def generate(self, prompt: str | Messages | ChatPrompt, **options: Any) -> Generation:
        """Answer a prompt; the options are those of :meth:`submit`."""
        return self.submit(prompt, **options).result()

    def token_ids(self, text: str) -> list[int]:
        """Return a text's ids, special-token text read as ordinary text."""
        return self.renderer.encode_chunk(text)

    def encode(self, prompt: str | Messages | ChatPrompt) -> list[int]:
        """Return the ids the model sees for a prompt: rendered and tokenised once, whole."""
        return list(self.renderer.encode(self.renderer.render(prompt)).ids)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.loaded.tokenizer

    @property
    def model_id(self) -> str:
        """Alias, path, hub id or class name of the model."""
        return self.loaded.model_id

    @property
    def model_fingerprint(self) -> str:
        """Content fingerprint of the weights."""
        return self.loaded.fingerprint

    @property
    def device(self) -> str:
        """Where the model is, for example ``"cpu"``."""
        return str(self.loaded.device)

    @property
    def dtype(self) -> str:
        """Compute dtype, for example ``"bfloat16"``."""
        return self._parts.dtype

    @property
    def kv_dtype(self) -> str:
        """Dtype in which keys and values are stored; ``"auto"`` is :attr:`dtype`."""
        return self._parts.kv_dtype

    @property
    def choice(self) -> str:
        """Which dtype and device are used, and why."""
        return self.loaded.choice

    @property
    def selector(self) -> str:
        """Name of the default selector."""
        return self._selector.name

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._parts.context_length

    @property
    def fusion_identity(self) -> str:
        """Digest of what fused KV depends on besides the prompt: :attr:`identity` and the context shifts in use."""
        shifts = self._parts.shift_name
        return self.identity if shifts is None else hashlib.sha256(f"{self.identity}:{shifts}".encode()).hexdigest()

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self.requests.closed

    def close(self) -> None:
        """Give up unanswered requests, finish the batch in the background, close the store; the model stays usable."""
        self.requests.close()
        self.corpus.close()
        self.store.close()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()
