"""Answers of the engine on their way to a client: text, tool calls and probabilities, part by part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from fused_kv_llm.decoding import (
    CallStream,
    JSONConstraint,
    TokenLogprobs,
    ToolCall,
    answer_schema,
    arguments_key,
    call_marker,
    chosen_tool,
    json_constraint,
    tools_in_system_message,
)
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.prompt import ChatPrompt, Prompt, RawPrompt
from fused_kv_llm.report import FusionReport
from fused_kv_llm.serving import RequestHandle

from .config import ServerConfig
from .messages import engine_messages
from .padding import padded
from .refusals import RefusedError
from .requests import ChatRequest, CompletionRequest, Sampling

__all__ = ["AnswerPart", "Choice", "chat_prompt", "interleaved", "submit_chat", "submit_completion"]

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer.

    Parameters
    ----------
    index : int
        Which answer of the request.
    text : str
    logprobs : list of TokenLogprobs
        Of the tokens that came since the part before, if they were asked for.
    calls : list of ToolCall
        Only in the last part.
    finish_reason : str or None
        Of the last part.
    report : FusionReport or None
        Of the last part.
    """

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    report: FusionReport | None = None


@dataclass(slots=True)
class Choice:
    """One answer of a request.

    Parameters
    ----------
    index : int
    handle : RequestHandle
    prompt : Prompt
    calls : CallStream or None
        Reads tool calls, if the model may make some.
    constraint : JSONConstraint or None
        What the answer is held to.
    one_call : bool
        Whether further calls than the first are left out.
    begins : tuple of float or None
        When the request came, by the event loop's clock, and the seconds after it of which the answer's beginning is a
        multiple.
    """

    index: int
    handle: RequestHandle
    prompt: Prompt
    calls: CallStream | None = None
    constraint: JSONConstraint | None = None
    one_call: bool = False
    begins: tuple[float, float] | None = None

    def parts(self) -> AsyncGenerator[AnswerPart]:
        """Return a generator of the answer's parts; leaving it ends the request."""
        return self._parts() if self.begins is None else padded(self._parts(), *self.begins)

    async def _parts(self) -> AsyncGenerator[AnswerPart]:
        logprobs: list[TokenLogprobs] = []
        async with aclosing(self.handle.pieces_async()) as pieces:
            async for piece in pieces:
                logprobs += [] if piece.logprobs is None else [piece.logprobs]
                text = piece.text if self.calls is None else self.calls.push(piece.text)
                if piece.finish_reason is not None:
                    yield self._last(text, piece.finish_reason, logprobs, piece.report)
                    return
                if text:
                    yield AnswerPart(self.index, text, logprobs)
                    logprobs = []

    def _last(
        self, text: str, reason: FinishReason, logprobs: list[TokenLogprobs], report: FusionReport | None
    ) -> AnswerPart:
        part = AnswerPart(self.index, text, logprobs, finish_reason=reason, report=report)
        if self.constraint is not None and self.constraint.shortened:
            part.finish_reason = "length"
        if self.calls is not None:
            answer = self.calls.finish()
            part.text += answer.text
            part.calls = answer.calls[:1] if self.one_call else answer.calls
            if part.calls and part.finish_reason == "stop":
                part.finish_reason = "tool_calls"
        return part


def submit_chat(engine: FusedKVEngine, request: ChatRequest, config: ServerConfig) -> list[Choice]:
    """Have a conversation answered; called in a thread of its own.

    Raises
    ------
    FusedKVError
        If it cannot be.
    """
    renderer = engine.renderer
    tools = [] if request.tool_choice == "none" else _tools(request)
    source = renderer.template_source if renderer.has_tools else "<tool_call>"
    choice = request.tool_choice
    named = chosen_tool(choice if choice is None or isinstance(choice, str) else choice.model_dump(), _names(tools))
    wanted = None if request.response_format is None else request.response_format.wanted()
    schema = answer_schema(tools, named, wanted, arguments_key(source))
    most = request.max_completion_tokens or request.max_tokens or config.max_answer_tokens
    options = request.sampling() | {"max_tokens": most, "timeout_s": config.request_timeout_s}
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0

    def submit(number: int, seeded: dict[str, Any]) -> Choice:
        constraint = None
        if schema is not None:
            constraint = json_constraint(engine.loaded, schema[0], max_tokens=most)
            seeded["constraint"] = constraint
        calls = CallStream(call_marker(source)) if tools else None
        handle = engine.submit(prompt, **options | seeded)
        return Choice(number, handle, prompt, calls, constraint, one_call=request.parallel_tool_calls is False)

    prompt = chat_prompt(engine, request)
    return _submit_all(submit, request, 1, config)


def chat_prompt(engine: FusedKVEngine, request: ChatRequest) -> ChatPrompt:
    """Return a conversation as the engine takes it; tools are described in words where the template has none."""
    messages, tools = engine_messages(request.messages), [] if request.tool_choice == "none" else _tools(request)
    if engine.renderer.has_tools:
        return ChatPrompt(messages, tools)
    return ChatPrompt(tools_in_system_message(messages, tools))


def submit_completion(engine: FusedKVEngine, request: CompletionRequest, config: ServerConfig) -> list[Choice]:
    """Have texts gone on with; called in a thread of its own.

    Raises
    ------
    FusedKVError
        If they cannot be.
    """
    texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    prompts: Sequence[Prompt] = [RawPrompt(text) for text in texts]
    options = request.sampling() | {"timeout_s": config.request_timeout_s, "logprobs": request.logprobs}
    options["max_tokens"] = request.max_tokens or config.max_answer_tokens
    each = request.n or 1

    def submit(number: int, seeded: dict[str, Any]) -> Choice:
        prompt = prompts[number // each]
        return Choice(number, engine.submit(prompt, **options | seeded), prompt)

    return _submit_all(submit, request, len(prompts), config)


def interleaved(choices: Sequence[Choice]) -> AsyncGenerator[AnswerPart]:
    """Return a generator of the parts of several answers as they come; leaving it ends all that have begun."""
    return choices[0].parts() if len(choices) == 1 else _interleaved(choices)


async def _interleaved(choices: Sequence[Choice]) -> AsyncGenerator[AnswerPart]:
    arrived: asyncio.Queue[AnswerPart | BaseException | None] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        try:
            async with aclosing(choice.parts()) as parts:
                async for part in parts:
                    arrived.put_nowait(part)
            arrived.put_nowait(None)
        except BaseException as error:
            arrived.put_nowait(error)
            raise

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        left = len(tasks)
        while left:
            part = await arrived.get()
            if isinstance(part, BaseException):
                raise part
            if part is None:
                left -= 1
            else:
                yield part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _submit_all(submit: Any, request: Sampling, prompts: int, config: ServerConfig) -> list[Choice]:
    each = request.n or 1
    if prompts * each > config.max_choices:
        raise RefusedError(f"{prompts * each} answers are more than the {config.max_choices} of one request", param="n")
    choices: list[Choice] = []
    try:
        for number in range(prompts * each):
            seeded = {} if request.seed is None else {"seed": request.seed + number % each}
            choices.append(submit(number, seeded))
    except BaseException:
        for choice in choices:
            choice.handle.cancel()
        raise
    return choices


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in request.tools or ()]


def _names(tools: Sequence[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]
