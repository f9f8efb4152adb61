"""The fused-KV engine as a LangChain LLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterable
from contextlib import aclosing, closing
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    Generation,
    GenerationChunk,
    LLMResult,
)
from pydantic import ConfigDict

from fused_kv_llm.adapter import PER_CALL_OPTIONS, FusedKVModel, collect_in_thread, iterate_in_threads, stream_all
from langchain_fused_kv.base import LangChainFusedKV

__all__ = ["FusedKVLLM"]

_Piece = tuple[str, dict[str, Any] | None]


class FusedKVLLM(LangChainFusedKV, BaseLLM):
    """A model in this process that reuses the stored KV of the chunks it finds in a prompt.

    A prompt is a string. If the model has a chat template, the prompt becomes one user message of it, as an
    instruction-tuned model expects; ``wrap_chat_template=False`` sends the string as it is. LangChain renders a
    ``ChatPromptTemplate`` in front of this LLM as ``"System: ...\\nHuman: ..."``, and all of that becomes the user
    message; a ``PromptTemplate`` adds no such words. The answer never repeats the prompt.

    Chunks are found by their text, so every chain works whose prompt contains the retrieved texts verbatim. A text
    without stored KV is prefilled like any other: the answer is right, only slower.

    Parameters
    ----------
    **options
        The options of an engine, :class:`~fused_kv_llm.config.EngineConfig`; `max_tokens`, `temperature`, `top_p`,
        `stop` and `seed` of :class:`~fused_kv_llm.adapter.FusedKVModel`; and LangChain's own (`callbacks`, `cache`,
        `tags`, ...). Those of the engine cannot change once the model is loaded, except for `recompute_ratio` and
        `selector`.

    Raises
    ------
    ConfigError
        For unknown options and values that cannot work.
    ModelNotFoundError, UnsupportedModelError, StoreUnavailableError
        From the engine.

    Notes
    -----
    ``llm.bind(recompute_ratio=0.5, max_tokens=64)`` and ``llm.invoke(prompt, seed=7)`` override recompute_ratio,
    selector, max_tokens, temperature, top_p and seed for a call. LangChain's cache keeps the answers of different
    options and models apart. A cached answer carries the report of the request that made it.

    Examples
    --------
    >>> import tempfile
    >>> from langchain_fused_kv import FusedKVLLM
    >>> llm = FusedKVLLM(model="smollm2-135m", kv_dir=tempfile.mkdtemp(), max_tokens=8)
    >>> passage = "Larkspur Ferries was founded in 1931 by two brothers who owned one steamer. " * 3
    >>> llm.build_kv_cache([passage], progress=False).chunks_new
    1
    >>> text = llm.invoke(passage + "\\n\\nQuestion: When was Larkspur Ferries founded?")
    >>> llm.last_report.chunks_found, llm.last_report.reused_tokens > 0
    (1, True)
    >>> exact = llm.bind(recompute_ratio=1.0).invoke(passage + "\\n\\nQuestion: Who founded it?")
    >>> llm.last_report.reused_tokens
    0
    """

    # The configuration of BaseLLM would win over that of FusedKVModel.
    model_config: ClassVar[ConfigDict] = FusedKVModel.model_config

    @property
    def _llm_type(self) -> str:
        return "fused_kv"

    def proposed(self, prompt: Any) -> str:
        """Return what the engine is asked for a prompt."""
        return self._convert_input(prompt).to_string()

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text in the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.engine.token_ids(text)

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Generate for several prompts; see :meth:`BaseLLM.generate`.

        The options of the call become fields of a copy, because LangChain's cache only considers fields.
        """
        return super(FusedKVLLM, self._with_call_options(kwargs)).generate(prompts, *args, **kwargs)

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Generate for several prompts, asynchronously; see :meth:`generate`."""
        return await super(FusedKVLLM, self._with_call_options(kwargs)).agenerate(prompts, *args, **kwargs)

    def _with_call_options(self, kwargs: dict[str, Any]) -> FusedKVLLM:
        changed = {name: kwargs.pop(name) for name in PER_CALL_OPTIONS if name in kwargs}
        return self.model_copy(update=changed) if changed else self

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return self._result(self._pieces(prompts, stop, kwargs))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return self._result(await collect_in_thread(self._pieces(prompts, stop, kwargs)))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Generator[GenerationChunk]:
        with closing(self._pieces([prompt], stop, kwargs)) as pieces:
            for text, info in pieces:
                chunk = GenerationChunk(text=text, generation_info=info)
                if run_manager is not None:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        async with aclosing(iterate_in_threads(self._stream(prompt, stop, **kwargs))) as chunks:
            async for chunk in chunks:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _pieces(self, prompts: list[str], stop: list[str] | None, call: dict[str, Any]) -> Generator[_Piece]:
        """Yield the answers' text piece by piece; the last piece of each answer comes with its usage and report."""
        options = self._engine_call(stop, call)
        checks = [self._runtime.check_retrievals(prompt) for prompt in prompts]
        with closing(stream_all(self.engine, prompts, options, [check.texts for check in checks])) as answers:
            for answer, check in zip(answers, checks, strict=True):
                with closing(answer):
                    for piece in answer:
                        info = None
                        if piece.report is not None:
                            info = self._runtime.finish(piece.finish_reason, piece.report, check)
                        yield piece.text, info

    def _result(self, pieces: Iterable[_Piece]) -> LLMResult:
        generations: list[list[Generation | ChatGeneration | GenerationChunk | ChatGenerationChunk]] = []
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        text = ""
        for more, info in pieces:
            text += more
            if info is not None:
                generations.append([Generation(text=text, generation_info=info)])
                text = ""
                for name in usage:
                    usage[name] += info["token_usage"][name]
        return LLMResult(
            generations=generations,
            llm_output={"model_name": self.engine.model_id, "token_usage": usage},
        )
