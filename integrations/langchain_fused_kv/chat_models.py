"""The fused-KV engine as a LangChain chat model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import aclosing, closing
from typing import Any, ClassVar, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import ConfigDict, Field, SecretStr

from fused_kv_llm.adapter import FusedKVModel, collect_in_thread, iterate_in_threads
from fused_kv_llm.decoding import (
    CallStream,
    ToolAnswer,
    answer_schema,
    arguments_key,
    call_marker,
    chosen_tool,
    json_constraint,
)
from fused_kv_llm.decoding import tools_in_system_message as without_template
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.online import Piece
from fused_kv_llm.prompt import ChatPrompt
from langchain_fused_kv.base import LangChainFusedKV
from langchain_fused_kv.messages import to_engine_messages
from langchain_fused_kv.results import AnswerPiece, chat_chunk, chat_result
from langchain_fused_kv.structured import parser_for, with_raw

__all__ = ["ChatFusedKV"]

_Method = Literal["json_schema", "function_calling", "json_mode"]


class ChatFusedKV(LangChainFusedKV, BaseChatModel):
    """A chat model in this process that reuses the stored KV of the chunks it finds in a conversation.

    Messages are rendered with the model's own chat template. Chunks are found by their text, in whichever message
    they stand: the user's, the system's, or a tool's result.

    Parameters
    ----------
    **options
        The options of an engine, :class:`~fused_kv_llm.config.EngineConfig`; `max_tokens`, `temperature`, `top_p`,
        `stop` and `seed` of :class:`~fused_kv_llm.adapter.FusedKVModel`; and LangChain's own. The model needs a chat
        template. Objects with the same engine options share one engine, a ``FusedKVLLM`` included.
    tools_in_prompt : bool
        For models whose chat template has no format for tools: describe tools in the system message, and write calls
        and results as text. Without it, such a model refuses tools.
    timeout : float or None
        Seconds after which an answer ends with a ``TimeoutError``; checked after every token.
    max_retries, api_key, streaming
        Accepted because every chat model accepts them; a model in this process needs neither retries nor a key.
        With ``streaming=True``, ``invoke`` reports tokens to callbacks.

    Raises
    ------
    ConfigError
        For unknown options and values that cannot work, and for a model without a chat template.
    ModelNotFoundError, UnsupportedModelError, StoreUnavailableError
        From the engine.

    Notes
    -----
    ``usage_metadata["input_token_details"]["cache_read"]`` counts the prompt tokens that came from stored KV;
    ``response_metadata["fused_kv"]`` is the whole report.

    :meth:`with_structured_output` constrains decoding to the schema, so that even a small model returns valid JSON.
    `max_tokens` must leave room for the schema's own text; an answer that had to be shortened has the finish reason
    ``"length"``. :meth:`bind_tools` with ``tool_choice`` constrains the answer to a call in the same way.

    Examples
    --------
    >>> import tempfile
    >>> from pydantic import BaseModel
    >>> from langchain_fused_kv import ChatFusedKV
    >>> llm = ChatFusedKV(model="smollm2-135m", kv_dir=tempfile.mkdtemp(), max_tokens=24)
    >>> passage = "Larkspur Ferries was founded in 1931 by two brothers who owned one steamer. " * 3
    >>> llm.build_kv_cache([passage], progress=False).chunks_new
    1
    >>> answer = llm.invoke([("system", passage), ("human", "When was Larkspur Ferries founded?")])
    >>> answer.usage_metadata["input_token_details"]["cache_read"] > 20
    True
    >>> class Company(BaseModel):
    ...     founded: int
    >>> company = llm.with_structured_output(Company).invoke(passage + "When was it founded?")
    >>> isinstance(company.founded, int)
    True
    """

    # The configuration of BaseChatModel would win over that of FusedKVModel.
    model_config: ClassVar[ConfigDict] = ConfigDict(**{**FusedKVModel.model_config, "arbitrary_types_allowed": True})
    tools_in_prompt: bool = False
    timeout: float | None = Field(default=None, gt=0)
    max_retries: int | None = None
    api_key: SecretStr | None = Field(default=None, repr=False, exclude=True)
    streaming: bool = False

    def model_post_init(self, context: Any) -> None:
        """Refuse a model that cannot render messages."""
        super().model_post_init(context)
        if not self.engine.renderer.template_source:
            self._runtime.give_up()
            raise ConfigError(
                f"{self.engine.model_id!r} has no chat template, so messages cannot be rendered: use FusedKVLLM, an "
                "instruction-tuned model, or set tokenizer.chat_template."
            )

    @property
    def _llm_type(self) -> str:
        return "chat_fused_kv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "tools_in_prompt": self.tools_in_prompt}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop, **kwargs)
        params["ls_provider"] = "fused_kv"
        params["ls_model_name"] = str(kwargs.get("model") or self.engine.model_id)
        return params

    # -- counting --------------------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text in the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.engine.token_ids(text)

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> int:
        """Return the tokens of a rendered conversation, the template's own included."""
        described = [convert_to_openai_tool(tool) for tool in tools or ()]
        return len(self.engine.encode(self._prompt(messages, described)))

    # -- tools and structured output -------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools.

        Parameters
        ----------
        tools : sequence
            Functions, pydantic classes, LangChain tools, or descriptions in OpenAI's form.
        tool_choice : str, bool, dict or None
            ``"any"``, ``"required"`` or True forces a call, a name forces that tool's, ``"auto"`` or None leaves it
            to the model, ``"none"`` forbids calls.

        Raises
        ------
        ConfigError
            If the chat template has no format for tools (see `tools_in_prompt`), or a chosen tool is not there.
        """
        if not self.engine.renderer.has_tools and not self.tools_in_prompt:
            raise ConfigError(
                f"The chat template of {self.engine.model_id!r} has no format for tools. Use a model whose template "
                "has one, or ChatFusedKV(..., tools_in_prompt=True), which describes them in the system message."
            )
        kwargs.pop("strict", None)
        kwargs.pop("parallel_tool_calls", None)
        described = [convert_to_openai_tool(tool) for tool in tools]
        choice = chosen_tool(tool_choice, [tool["function"]["name"] for tool in described])
        return super().bind(tools=described, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: _Method = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a chain whose result has a given schema.

        Parameters
        ----------
        schema : dict or type
            JSON schema, pydantic class or TypedDict.
        include_raw : bool
            Return ``{"raw", "parsed", "parsing_error"}`` instead of the parsed object.
        method : {"json_schema", "function_calling", "json_mode"}
            ``"json_schema"`` constrains the answer to the schema, ``"function_calling"`` calls a tool of that schema.
            ``"json_mode"`` does the same as ``"json_schema"``.
        strict : bool or None
            Accepted for compatibility: all methods are always strict.

        Raises
        ------
        MissingExtraError
            When the chain runs, if ``llguidance`` is not installed.
        """
        if kwargs:
            raise ConfigError(f"with_structured_output does not know {', '.join(sorted(kwargs))}")
        told = {"kwargs": {"method": method}, "schema": convert_to_json_schema(schema)}
        if method == "function_calling":
            name = convert_to_openai_tool(schema)["function"]["name"]
            llm = self.bind_tools([schema], tool_choice=name, ls_structured_output_format=told)
        elif method in ("json_schema", "json_mode"):
            wanted = {"type": "json_schema", "schema": told["schema"]}
            llm = super().bind(response_format=wanted, ls_structured_output_format=told)
        else:
            raise ConfigError(f"method={method!r} is none of json_schema, function_calling, json_mode")
        parser = parser_for(schema, from_tool_call=method == "function_calling")
        return with_raw(llm, parser) if include_raw else llm | parser

    # -- answering -------------------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return chat_result(list(self._answer(messages, stop, kwargs)), self.engine.model_id)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        pieces = await collect_in_thread(self._answer(messages, stop, kwargs))
        return chat_result(pieces, self.engine.model_id)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Generator[ChatGenerationChunk]:
        for piece in self._answer(messages, stop, kwargs):
            yield chat_chunk(piece, self.engine.model_id)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(iterate_in_threads(self._stream(messages, stop, **kwargs))) as chunks:
            async for chunk in chunks:
                yield chunk

    def _answer(
        self, messages: list[BaseMessage], stop: list[str] | None, call: dict[str, Any]
    ) -> Generator[AnswerPiece]:
        """Yield the answer's text piece by piece; the last one comes with the calls and the report."""
        tools = call.pop("tools", None) or []
        choice, wanted = call.pop("tool_choice", None), call.pop("response_format", None)
        schema = answer_schema(tools, choice, wanted, arguments_key(self._call_source))
        call.pop("ls_structured_output_format", None)
        timeout = call.pop("timeout", self.timeout)
        options = self._engine_call(stop, call)
        constraint = None
        if schema is not None:
            constraint = json_constraint(self.engine.loaded, schema[0], max_tokens=options["max_tokens"])
            options["constraint"] = constraint
        check = self._runtime.check_retrievals("\n\n".join(str(message.text) for message in messages))
        options["expected"] = check.texts
        calls = CallStream(call_marker(self._call_source)) if tools else None
        for piece in _timed(self.engine.stream(self._prompt(messages, tools), **options), timeout):
            text = piece.text if calls is None else calls.push(piece.text)
            if piece.report is None:
                yield text, ToolAnswer(), {}
                continue
            answer = ToolAnswer() if calls is None else calls.finish()
            shortened = constraint is not None and constraint.shortened
            info = self._runtime.finish("length" if shortened else piece.finish_reason, piece.report, check)
            if answer.calls and not shortened:
                info["finish_reason"] = "tool_calls"
            yield text + answer.text, answer, info

    # -- prompts ---------------------------------------------------------------------------------------------

    @property
    def _call_source(self) -> str:
        """The text that shows how the model writes calls: its template, or our own description of the tools."""
        renderer = self.engine.renderer
        return renderer.template_source if renderer.has_tools else "<tool_call>"

    def proposed(self, prompt: Any) -> ChatPrompt:
        """Return what the engine is asked for a prompt without tools."""
        return self._prompt(self._convert_input(prompt).to_messages(), [])

    def _prompt(self, messages: Sequence[BaseMessage], tools: list[dict[str, Any]]) -> ChatPrompt:
        converted = to_engine_messages(messages)
        if self.tools_in_prompt and not self.engine.renderer.has_tools:
            return ChatPrompt(without_template(converted, tools))
        return ChatPrompt(converted, tools)


def _timed(pieces: Generator[Piece], timeout_s: float | None) -> Generator[Piece]:
    started = time.perf_counter()
    with closing(pieces):
        for piece in pieces:
            yield piece
            if timeout_s is not None and piece.report is None and time.perf_counter() - started > timeout_s:
                raise TimeoutError(f"The answer was not complete after timeout={timeout_s:g} seconds")
