"""The fused-KV engine as a LlamaIndex LLM."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, ClassVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.indices.base import BaseIndex
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.retrievers import BaseRetriever
from pydantic import BaseModel, ConfigDict

from fused_kv_llm.adapter import FusedKVModel, collect_in_thread, iterate_in_threads
from fused_kv_llm.decoding import json_constraint
from fused_kv_llm.errors import ConfigError
from llama_index_fused_kv.index_vectors import keep_vectors_of
from llama_index_fused_kv.messages import to_engine_messages
from llama_index_fused_kv.nodes import nodes_of, text_of

__all__ = ["FusedKVLLM"]

_Prompt = str | list[dict[str, str]]
_Piece = tuple[str, str, dict[str, Any] | None]


class FusedKVLLM(FusedKVModel, CustomLLM):
    """A model in this process that reuses the stored KV of the nodes it finds in a prompt.

    Nodes are found by their text. Every query engine and chat engine works that puts node text into its prompts
    verbatim, whatever metadata stands before it. A text without stored KV is prefilled like any other.

    Conversations are rendered with the model's own chat template; a completion becomes one user message of it. A
    model without a template gets completions as they are, and conversations in LlamaIndex's generic form
    (``user: ...``).

    Parameters
    ----------
    **options
        The options of an engine, :class:`~fused_kv_llm.config.EngineConfig`; `max_tokens`, `temperature`, `top_p`,
        `stop` and `seed` of :class:`~fused_kv_llm.adapter.FusedKVModel`; and LlamaIndex's own (`system_prompt`,
        `callback_manager`, `output_parser`, `pydantic_program_mode`).

    Raises
    ------
    ConfigError
        For unknown options and values that cannot work, and for ``messages_to_prompt`` or ``completion_to_prompt``
        where the model has a chat template: a prompt rendered twice would hold two templates.
    ModelNotFoundError, UnsupportedModelError, StoreUnavailableError
        From the engine.

    Notes
    -----
    Options can be given per call: ``llm.complete(prompt, max_tokens=64, recompute_ratio=0.5, stop=["\\n"])``. The
    response's ``raw`` has ``usage`` (read by LlamaIndex's ``TokenCountingHandler``), ``finish_reason`` and
    ``fused_kv``, the report.

    Examples
    --------
    >>> import tempfile
    >>> from llama_index_fused_kv import FusedKVLLM
    >>> llm = FusedKVLLM(model="smollm2-135m", kv_dir=tempfile.mkdtemp(), max_tokens=8)
    >>> passage = "Larkspur Ferries was founded in 1931 by two brothers who owned one steamer. " * 3
    >>> llm.build_kv_cache([passage], progress=False).chunks_new
    1
    >>> response = llm.complete(passage + "\\n\\nQuestion: When was Larkspur Ferries founded?")
    >>> response.raw["fused_kv"]["chunks_found"], llm.metadata.context_window
    (1, 8192)
    """

    # The configuration of LlamaIndex's LLM would win over that of FusedKVModel.
    model_config: ClassVar[ConfigDict] = ConfigDict(**{**FusedKVModel.model_config, "arbitrary_types_allowed": True})
    items_name: ClassVar[str] = "nodes, documents or strings"

    def model_post_init(self, context: Any) -> None:
        """Refuse a second template where the model has one."""
        super().model_post_init(context)
        generic = (None, generic_messages_to_prompt, default_completion_to_prompt)
        own = [name for name in ("completion_to_prompt", "messages_to_prompt") if getattr(self, name) not in generic]
        if own and self._has_template:
            self.close()
            raise ConfigError(
                f"{', '.join(own)}: the model's chat template renders the prompts. To render them differently, set "
                "tokenizer.chat_template and pass model= and tokenizer= as objects."
            )

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialised forms."""
        return "FusedKVLLM"

    @property
    def _has_template(self) -> bool:
        return bool(self.engine.renderer.template_source)

    @property
    def metadata(self) -> LLMMetadata:
        """Context window and name, from the model's configuration."""
        return LLMMetadata(
            context_window=self.engine.context_length,
            num_output=self.max_tokens,
            is_chat_model=self._has_template,
            is_function_calling_model=False,
            model_name=self.engine.model_id,
        )

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text in the model's tokenizer; ``Settings.tokenizer = llm.get_token_ids``."""
        return self.engine.token_ids(text)

    def _items_of(self, source: Any) -> list[Any]:
        return nodes_of(source)

    def _keep_vectors_of(self, source: Any, texts: Sequence[str]) -> None:
        if isinstance(source, (BaseIndex, BaseRetriever)):
            keep_vectors_of(source, nodes_of(source), self)

    def _text_of(self, item: Any) -> str:
        return text_of(item)

    # -- complete --------------------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; see the class for the options of a call."""
        answer = self._answer(self._completion_prompt(prompt, formatted), kwargs)
        return CompletionResponse(text=answer.pop("text"), raw=answer)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt piece by piece; the last response has ``raw``."""
        prepared = self._completion_prompt(prompt, formatted)

        def responses() -> CompletionResponseGen:
            for text, delta, raw in self._pieces(prepared, kwargs):
                yield CompletionResponse(text=text, delta=delta, raw=raw)

        return responses()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt in a thread, so that the event loop runs on."""
        answer = await self._collected(self._completion_prompt(prompt, formatted), kwargs)
        return CompletionResponse(text=answer.pop("text"), raw=answer)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Answer a prompt piece by piece, each computed in a thread."""
        prepared = self._completion_prompt(prompt, formatted)

        async def responses() -> CompletionResponseAsyncGen:
            async for text, delta, raw in iterate_in_threads(self._pieces(prepared, kwargs)):
                yield CompletionResponse(text=text, delta=delta, raw=raw)

        return responses()

    # -- chat ------------------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation, rendered with the model's chat template."""
        return _chat_response(self._answer(self._chat_prompt(messages), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece; the last response has ``raw``."""
        prompt = self._chat_prompt(messages)

        def responses() -> ChatResponseGen:
            for text, delta, raw in self._pieces(prompt, kwargs):
                yield ChatResponse(message=_assistant(text), delta=delta, raw=raw)

        return responses()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation in a thread, so that the event loop runs on."""
        return _chat_response(await self._collected(self._chat_prompt(messages), kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a conversation piece by piece, each computed in a thread."""
        prompt = self._chat_prompt(messages)

        async def responses() -> ChatResponseAsyncGen:
            async for text, delta, raw in iterate_in_threads(self._pieces(prompt, kwargs)):
                yield ChatResponse(message=_assistant(text), delta=delta, raw=raw)

        return responses()

    # -- structured ------------------------------------------------------------------------------------------

    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """Return an `output_cls`; decoding is constrained to its JSON schema, so it always parses.

        Raises
        ------
        MissingExtraError
            If ``llguidance`` is not installed.
        ValidationError
            If the answer was cut by ``max_tokens``, or breaks a rule that a JSON schema cannot express.
        """
        messages, options = self._constrained(output_cls, prompt, llm_kwargs, prompt_args)
        return output_cls.model_validate_json(self.chat(messages, **options).message.content or "")

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """Return an `output_cls`; see :meth:`structured_predict`."""
        messages, options = self._constrained(output_cls, prompt, llm_kwargs, prompt_args)
        return output_cls.model_validate_json((await self.achat(messages, **options)).message.content or "")

    def _constrained(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None,
        prompt_args: dict[str, Any],
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        options = dict(llm_kwargs or {})
        max_tokens = options.setdefault("max_tokens", self.max_tokens)
        options["constraint"] = json_constraint(
            self.engine.loaded, output_cls.model_json_schema(), max_tokens=max_tokens
        )
        return list(self._extend_messages(prompt.format_messages(llm=self, **prompt_args))), options

    # -- what all of them do ---------------------------------------------------------------------------------

    def _completion_prompt(self, prompt: str, formatted: bool) -> str:
        if formatted or self._has_template or self.completion_to_prompt is None:
            return prompt
        return self.completion_to_prompt(prompt)

    def _chat_prompt(self, messages: Sequence[ChatMessage]) -> _Prompt:
        checked = to_engine_messages(messages)
        if self._has_template or self.messages_to_prompt is None:
            return checked
        return self.messages_to_prompt(messages)

    def proposed(self, prompt: str | Sequence[ChatMessage]) -> _Prompt:
        """Return what the engine is asked for a complete prompt, or for chat messages."""
        return (
            self._completion_prompt(prompt, formatted=False) if isinstance(prompt, str) else self._chat_prompt(prompt)
        )

    def _answer(self, prompt: _Prompt, call: dict[str, Any]) -> dict[str, Any]:
        return _whole(list(self._pieces(prompt, call)))

    async def _collected(self, prompt: _Prompt, call: dict[str, Any]) -> dict[str, Any]:
        return _whole(await collect_in_thread(self._pieces(prompt, call)))

    def _pieces(self, prompt: _Prompt, call: dict[str, Any]) -> Generator[_Piece]:
        """Yield the text so far, its new part, and with the last piece the usage and the report."""
        options = self._call_options(call)
        constraint = options["constraint"]
        check = self._runtime.check_retrievals(_text(prompt))
        options["expected"] = check.texts
        text = ""
        with closing(self.engine.stream(prompt, **options)) as pieces:
            for piece in pieces:
                text += piece.text
                raw = None
                if piece.report is not None:
                    shortened = constraint is not None and constraint.shortened
                    reason = "length" if shortened else piece.finish_reason
                    raw = _raw(self._runtime.finish(reason, piece.report, check))
                yield text, piece.text, raw

    def _call_options(self, call: dict[str, Any]) -> dict[str, Any]:
        options = dict(call)
        stop, constraint = options.pop("stop", None), options.pop("constraint", None)
        stops = [stop] if isinstance(stop, str) else stop
        return {**self._engine_call(stops, options), "constraint": constraint}


def _text(prompt: _Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def _raw(info: dict[str, Any]) -> dict[str, Any]:
    return {"usage": info["token_usage"], "finish_reason": info["finish_reason"], "fused_kv": info["fused_kv"]}


def _whole(pieces: Sequence[_Piece]) -> dict[str, Any]:
    text, _, raw = pieces[-1]
    return {"text": text, **(raw or {})}


def _assistant(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)


def _chat_response(answer: dict[str, Any]) -> ChatResponse:
    return ChatResponse(message=_assistant(answer.pop("text")), raw=answer)
